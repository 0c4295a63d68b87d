"""The `vllm serve` process: starting it with progress, calling it, stopping it, and its errors."""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import NoReturn

from kit.http_client import ConnectionFailed, HttpClient, Response, ResponseTimeout
from kit.types import Json
from trainer.engines import vllm_log
from trainer.engines.vllm_args import KERNELS
from trainer.errors import BadRequest, NotFound, TrainerError, WorkerDied
from trainer.processes import large_json
from trainer.processes.process_group import members
from trainer.processes.worker import environment_without_keys, open_log

logger = logging.getLogger(__name__)
LOG_INTERVAL = 5.0  # seconds between two log lines while vLLM starts
FLAT = "/v1/flat_completions"  # of `in_vllm`
STOP_WITHIN = 12.0  # seconds; `process_group` kills the group after 8


class VllmProcess:
    """One vLLM process, behind a socket file in a directory that only this user can enter.

    It is started once. To restart vLLM, create another `VllmProcess`.
    """

    def __init__(self, program: list[str], *, log: Path) -> None:
        self.log = log
        self._program = program
        self._process: asyncio.subprocess.Process | None = None
        self._ended = self._stopped = self._has_kernels = False
        self._log_start = 0
        self._directory: Path | None = None
        self._client = HttpClient()
        self.asleep = False
        self.flat = False
        """Whether this vLLM has the route of `in_vllm`."""

    @property
    def started(self) -> bool:
        return self._process is not None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(
        self,
        arguments: Callable[[Path], list[str]],
        environment: Mapping[str, str],
        reserved: asyncio.Event,
    ) -> None:
        """Start vLLM with `arguments(socket)` and wait until it answers on that socket.

        `reserved` is set on the way, when vLLM has all of its GPU memory.
        """
        # A temporary directory, because a socket's path can have at most 107 bytes.
        self._directory = Path(tempfile.mkdtemp(prefix="art-vllm-"))
        socket = self._directory / "api"
        self._client = HttpClient(socket=socket)
        try:
            await self._launch(arguments(socket), environment)
            await self._wait_until_ready(reserved)
            self.flat = (await self._client.request("GET", FLAT)).status == 405
            if not self.flat:
                logger.warning("vLLM has no `%s`, so it answers more slowly; see its log", FLAT)
        except BaseException:
            await self.stop()
            raise

    async def work(self, arguments: list[str], environment: Mapping[str, str]) -> NoReturn:
        """Run as a part of another machine's vLLM, until it dies or the caller is cancelled."""
        try:
            await (await self._launch(arguments, environment)).wait()
            raise self.died()
        finally:
            await self.stop()

    async def _launch(
        self, arguments: list[str], environment: Mapping[str, str]
    ) -> asyncio.subprocess.Process:
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        self._has_kernels = KERNELS in arguments
        if self._stopped:
            raise WorkerDied("vLLM was stopped before it started")
        with open_log(self.log) as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "trainer.processes.process_group", *self._program),
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**environment_without_keys(), **environment},
                start_new_session=True,  # a process group that can be killed as a whole
            )
        logger.info("vLLM is starting (pid %s); its log is %s", self._process.pid, self.log)
        return self._process

    async def stop(self) -> None:
        """End every vLLM process, with SIGTERM first and then with SIGKILL."""
        self._stopped = True
        if self._process and not self._ended:
            if self._process.returncode is None:
                self._process.terminate()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), STOP_WITHIN)
            # The group may have survived a leader that was killed.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._ended = True
            await self._process.wait()
            await self._wait_until_group_is_gone()
        await self._client.aclose()
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)

    async def _wait_until_group_is_gone(self, within: float = 5.0) -> None:
        """Wait for the grandchildren to exit: their memory may be needed immediately."""
        assert self._process
        deadline = time.monotonic() + within
        while members(self._process.pid) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    async def context(self) -> int:
        """Return the maximum number of tokens of prompt and completion together."""
        models = (await self._client.request("GET", "/v1/models")).json()
        return int(models["data"][0]["max_model_len"])

    async def sleep(self) -> None:
        """Free the GPU memory until `wake`. A sleeping vLLM cannot handle other requests."""
        if not self.asleep:
            started, self.asleep = time.monotonic(), True
            await self.post("/sleep?level=1", {})
            logger.info("vLLM went to sleep in %.1f s", time.monotonic() - started)

    async def wake(self) -> None:
        started = time.monotonic()
        await self.post("/wake_up", {})
        self.asleep = False
        logger.info("vLLM woke up in %.1f s", time.monotonic() - started)

    async def post(self, path: str, body: Json) -> Json:
        if not self.running:
            raise self.died()
        try:
            response = await self._client.request("POST", path, body)
        except ConnectionFailed as error:
            await self._fail(str(error))
        await self._check(response)
        if response.content_type != "application/json":
            return {}  # the response to loading a LoRA is plain text
        result: Json = large_json.parse(response.content)
        return result

    async def stream(self, path: str, body: Json) -> AsyncGenerator[Json]:
        """Yield the events of a streamed response. Closing the iterator early cancels it."""
        if not self.running:
            raise self.died()
        try:
            async with self._client.stream("POST", path, body) as response:
                if response.status != 200:
                    await self._check(await response.whole())
                async for line in _lines(response.parts()):
                    if not line.startswith(b"data: {"):
                        continue
                    event = json.loads(line[len(b"data: ") :])
                    if error := event.get("error"):
                        await self._fail(str(error.get("message", error)))
                    yield event
        except ConnectionFailed as error:
            await self._fail(str(error))

    async def _check(self, response: Response) -> None:
        """Raise the error that a response reports, if any."""
        if response.status == 200:
            return
        try:
            message = str(response.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):
            message = response.text.strip() or f"status {response.status}"
        if response.status == 404:
            raise NotFound(f"vLLM: {message}")
        if response.status < 500:
            raise BadRequest(f"vLLM: {message}")
        await self._fail(message)

    async def _fail(self, message: str) -> NoReturn:
        """Raise `WorkerDied` if vLLM is ending, otherwise an error with `message`."""
        if not await self._is_ending():
            raise TrainerError(f"vLLM: {message}", hint=f"See `{self.log}`")
        died = self.died()
        await self.stop()
        raise died

    async def _is_ending(self, within: float = 30.0) -> bool:
        """Return whether vLLM ends, or stays unhealthy for `within` seconds, after an error."""
        deadline = time.monotonic() + within
        while self.running and time.monotonic() < deadline:
            if await self._healthy():
                return False
            await asyncio.sleep(0.1)
        return True

    def died(self) -> WorkerDied:
        """Return an error that says why vLLM died."""
        cause = vllm_log.cause(self._lines())
        hint = vllm_log.hint(cause) or "It restarts at the next request"
        return WorkerDied(f"vLLM ended: {cause}", hint=f"{hint}; its whole log is `{self.log}`")

    @property
    def died_in_our_kernels(self) -> bool:
        died = self._has_kernels and self.started and not self.running
        return died and vllm_log.names_our_kernels(self._lines())

    async def _wait_until_ready(self, reserved: asyncio.Event) -> None:
        started = logged = time.monotonic()
        while self._stopped or not await self._healthy():
            if not self.running:
                raise self.died()
            if not reserved.is_set() and vllm_log.has_reserved(self._lines()):
                reserved.set()
            now = time.monotonic()
            if now - logged >= LOG_INTERVAL:
                logged = now
                logger.info(
                    "vLLM is %s (%.0f s so far)", vllm_log.stage(self._lines()), now - started
                )
            await asyncio.sleep(0.2)
        reserved.set()
        logger.info("vLLM is ready after %.0f s", time.monotonic() - started)

    async def _healthy(self) -> bool:
        try:
            answer = await self._client.request("GET", "/health", within=5)
            return answer.status == 200
        except (ConnectionFailed, ResponseTimeout):
            return False

    def _lines(self) -> list[str]:
        """Return the lines that this process logged, without those of earlier ones."""
        try:
            with self.log.open("rb") as file:
                file.seek(self._log_start)
                return file.read().decode(errors="replace").splitlines()
        except OSError:
            return []


async def _lines(parts: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    """Yield lines that end with a newline. Text may have other line ends inside, such as U+2028."""
    left = b""
    async for part in parts:
        *lines, left = (left + part).split(b"\n")
        for line in lines:
            yield line
