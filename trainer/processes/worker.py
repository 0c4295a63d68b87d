"""How the server talks to its worker processes: JSON lines over a socket, their standard input.

The worker's stdout and stderr go to its log file, so that nothing a library prints can be taken
for an answer.
"""

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kit.errors import KitError
from kit.types import Json
from trainer.errors import OutOfMemory, TrainerError, WorkerDied
from trainer.processes.rpc import Calls, write_error

logger = logging.getLogger(__name__)
PARENT_VARIABLE = "ART_PARENT_PID"  # who started a process, which may be gone before it asks
CHUNK = 1 << 20
OUT_OF_MEMORY = 77  # exit code of a process that the GPU has no room for
LIMIT = 1 << 30  # bytes in one line: a train request holds every trajectory of a step


class Worker:
    """A child process and the calls to it. Starting it is `start`; a dead one raises WorkerDied."""

    def __init__(
        self,
        name: str,
        module: str,
        arguments: list[str],
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.log = log
        self._environment = environment or {}
        self._command = [sys.executable, "-m", module, *arguments]
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._calls = Calls(self._write, self._died)
        self._tasks: list[asyncio.Task[None]] = []
        self._reviving = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start the process and wait until it says it is ready."""
        ours, theirs = socket.socketpair()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with theirs, self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=theirs.fileno(),  # all that torchrun, if it is between us, hands on
                stdout=log,
                stderr=log,
                env={**os.environ, **self._environment, PARENT_VARIABLE: str(os.getpid())},
            )
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=LIMIT)
        self._tasks = [asyncio.create_task(self._read(reader))]
        logger.info("%s started (pid %s)", self.name, self._process.pid)
        await self.call("ready")

    async def revive(self) -> bool:
        """Start the process again if it has died; tells whether it had."""
        async with self._reviving:
            if self.running:
                return False
            logger.warning("%s", self._died().message)
            if self._writer:
                self._writer.close()
            await self.start()
            return True

    async def call(self, method: str, **params: Any) -> Any:
        """Call `method` and return its result."""
        return await self._calls.call(method, **params)

    def stream(self, method: str, **params: Any) -> AsyncIterator[Json]:
        """Call `method` and yield its rows; one that is left early is cancelled."""
        return self._calls.stream(method, **params)

    async def stop(self) -> None:
        """End the process: politely first, then not."""
        if self._writer:
            self._writer.close()
        if self._process and self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), 10)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        for task in self._tasks:
            task.cancel()

    def _write(self, message: str) -> None:
        if not self.running or self._writer is None or self._writer.is_closing():
            raise self._died()
        self._writer.write(message.encode() + b"\n")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            # A worker that ended with calls unread resets the connection.
            with contextlib.suppress(ConnectionResetError):
                while line := await reader.readline():
                    self._calls.take(json.loads(line))
        finally:
            if self._process:
                await self._process.wait()
            self._calls.end()

    def _died(self) -> TrainerError:
        code = self._process.returncode if self._process else None
        if code == OUT_OF_MEMORY:
            return OutOfMemory(f"The {self.name} ran out of GPU memory")
        if code is not None and code < 0:
            how = f"was killed by `{signal.Signals(-code).name}`"
        else:
            how = f"ended with exit code `{code}`: {last_line(self.log)}"
        return WorkerDied(
            f"The {self.name} process {how}", hint=f"See `{self.log}` for its whole output"
        )


def last_line(log: Path) -> str:
    """The last thing a process said: for a traceback, its cause."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"


class Channel:
    """The worker's end. `poll` gives the calls that have come; the answers go out by id."""

    def __init__(self) -> None:
        # A worker that outlives a killed server could write a checkpoint its successor writes too.
        die_with_parent(signal.SIGKILL)
        self._socket = socket.socket(fileno=take_stdin())
        self._buffer = bytearray()
        self.open = True

    def poll(self, *, wait: bool) -> Iterator[tuple[int, str, Json]]:
        """Yield the calls that have arrived; with `wait`, block until there is one."""
        self._socket.setblocking(wait)
        try:
            while self.open and b"\n" not in self._buffer[-CHUNK:]:
                self._receive()
            self._socket.setblocking(False)
            while self.open:
                self._receive()
        except BlockingIOError:
            pass
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            call = json.loads(line)
            yield call["id"], call["method"], call["params"]

    def _receive(self) -> None:
        chunk = self._socket.recv(CHUNK)
        self._buffer += chunk
        self.open = bool(chunk)

    def row(self, call: int, row: Json) -> None:
        self._write({"id": call, "row": row})

    def done(self, call: int, result: Any = None) -> None:
        self._write({"id": call, "done": result})

    def error(self, call: int, error: Exception) -> None:
        """Send `error`; what is not ours is logged whole and sent as a TrainerError."""
        if not isinstance(error, KitError):
            logger.exception("call %s failed", call)
        self._write({"id": call, "error": write_error(error)})

    def _write(self, message: Json) -> None:
        self._socket.setblocking(True)
        self._socket.sendall(json.dumps(message).encode() + b"\n")


def visible(devices: str | None) -> dict[str, str]:
    """The environment in which only these GPUs are seen; None sees all."""
    return {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}


def die_with_parent(how: signal.Signals) -> None:
    """Have this process get the signal `how` when the one that started it is gone."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, how)
    if os.environ.get(PARENT_VARIABLE, str(os.getppid())) != str(os.getppid()):
        os.kill(os.getpid(), how)  # it was gone before we came to ask


def take_stdin() -> int:
    """What this process was given as its standard input, which is empty from now on."""
    taken = os.dup(0)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    return taken


def serve(handlers: dict[str, Callable[..., Any]]) -> None:
    """Answer calls one at a time until the server goes. A handler that yields streams its rows."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    channel = Channel()
    handlers = {"ready": lambda: None, **handlers}
    while channel.open:
        for call, method, params in channel.poll(wait=True):
            if method == "cancel":  # what runs here runs to its end
                continue
            try:
                result = handlers[method](**params)
                if isinstance(result, Iterator):
                    for row in result:
                        channel.row(call, row)
                    result = None
                channel.done(call, result)
            except Exception as error:  # a bad request must not end the worker
                channel.error(call, error)
