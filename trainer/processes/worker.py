"""Worker processes: the server's handle on one, and the worker's own main loop.

The two ends exchange JSON lines (`rpc`) over a socket, which is the worker's standard input. The
worker's stdout and stderr go to its log file, so output from a library is never read as a reply.
"""

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from kit.errors import KitError
from kit.types import Json
from trainer.errors import OutOfMemory, TrainerError, WorkerDied
from trainer.processes.rpc import RpcClient, RpcServer

logger = logging.getLogger(__name__)
PARENT_VARIABLE = "ART_PARENT_PID"  # the pid of the parent, which may die before the child checks
ERROR, HINT = "error: ", "hint: "  # how the lines of an error in a log begin
OUT_OF_MEMORY = 77  # exit code of a process that does not fit on the GPU
# Such as ART_API_KEY and OPENAI_API_KEY, and Ray's token, which lets one run code on all machines.
_KEY_NAME = re.compile(r"_(API|SECRET|PUBLIC)_KEY$|^RAY_AUTH_TOKEN")
LIMIT = 1 << 30  # bytes in one line of a reply

# How OpenMP threads wait for each other. On a machine with idle cores, most waits are shorter than
# 10,000 spins (0.5 ms), so that this costs nothing there.
OPENMP_WAITING = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}


class Worker:
    """The server's handle on a worker process. Calls to a dead worker raise `WorkerDied`."""

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
        self._log_start = 0
        self._command = [sys.executable, "-P", "-m", module, *arguments]
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._rpc = RpcClient(self._write, self._died)
        self._tasks: list[asyncio.Task[None]] = []
        self._reviving = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start the process and wait until it is ready."""
        ours, theirs = socket.socketpair()
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        with theirs, open_log(self.log) as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=theirs.fileno(),  # the only file that torchrun passes on to its children
                stdout=log,
                stderr=log,
                env={
                    **environment_without_keys(),
                    **openmp_environment(os.environ),
                    **self._environment,
                    PARENT_VARIABLE: str(os.getpid()),
                },
            )
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=LIMIT)
        self._tasks = [asyncio.create_task(self._read(reader))]
        logger.info("%s started (pid %s)", self.name, self._process.pid)
        await self.call("ready")

    async def revive(self) -> bool:
        """Start the process again if it has died, and return whether it had."""
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
        return await self._rpc.call(method, **params)

    def stream(self, method: str, **params: Any) -> AsyncIterator[Json]:
        """Call `method` and yield its rows. Closing the iterator early cancels the call."""
        return self._rpc.stream(method, **params)

    async def stop(self) -> None:
        """End the process with SIGTERM, and with SIGKILL after 10 seconds."""
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
            # A worker that ends with calls unread resets the connection.
            with contextlib.suppress(ConnectionResetError):
                while line := await reader.readline():
                    self._rpc.receive(json.loads(line))
        finally:
            if self._process:
                await self._process.wait()
            self._rpc.fail_all()

    def _died(self) -> TrainerError:
        code = self._process.returncode if self._process else None
        if code == OUT_OF_MEMORY:
            return OutOfMemory(f"The {self.name} ran out of GPU memory")
        if code is not None and code < 0:
            how = f"was killed by `{signal.Signals(-code).name}`"
        else:
            how = f"ended with exit code `{code}`: {cause(self.log, self._log_start)}"
        return WorkerDied(
            f"The {self.name} process {how}", hint=f"See `{self.log}` for its whole output"
        )


def cause(log: Path, start: int = 0) -> str:
    """Return why a process ended: the last error in its log from byte `start` on.

    Its own errors are in a line that begins with `error:`; a traceback ends with its cause.
    """
    try:
        with log.open("rb") as file:
            file.seek(start)
            text = file.read().decode(errors="replace")
    except OSError:
        text = ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
    others = [line for line in lines if not line.startswith(HINT)]
    return (errors or others or ["its log is empty"])[-1]


def run_worker(main: Callable[[], None]) -> None:
    """Run a worker's main function. An error of ours is logged in one line, without a traceback."""
    try:
        main()
    except KitError as error:
        sys.stderr.write(f"{ERROR}{' '.join(error.message.split())}\n")
        if error.hint:
            sys.stderr.write(f"{HINT}{error.hint}\n")
        sys.exit(1)


def open_log(path: Path) -> BinaryIO:
    """Open the log of a process; a disk that takes none must not keep the process from starting."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab")
    except OSError as error:
        logger.error("`%s` cannot be written, so its output is lost: %s", path, error.strerror)
        return open(os.devnull, "ab")


def environment_without_keys() -> dict[str, str]:
    """This process's environment for a child, without the keys that only this process needs.

    Libraries in a child run code of others, and write their environment into logs and reports.
    Credentials for downloads stay: those of Hugging Face and of clouds have other names.
    """
    return {name: value for name, value in os.environ.items() if not _KEY_NAME.search(name)}


def gpu_environment(devices: str | None) -> dict[str, str]:
    """Return the variables that show a process only these GPUs; None shows all of them."""
    return {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}


def openmp_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that keep OpenMP threads from spinning long; none if one is set already.

    At the end of each operation the threads wait for the slowest one. By default they spin for
    about 15 ms (libgomp) or 200 ms (libomp), which on a busy machine is time that the slowest
    thread needs to finish.
    """
    chosen = {"OMP_WAIT_POLICY", *OPENMP_WAITING} & environment.keys()
    return {} if chosen else dict(OPENMP_WAITING)


def die_with_parent(signal_number: signal.Signals) -> None:
    """Have this process receive the signal when its parent dies."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal_number)
    if os.environ.get(PARENT_VARIABLE, str(os.getppid())) != str(os.getppid()):
        os.kill(os.getpid(), signal_number)  # the parent died before the call above


def take_stdin() -> int:
    """Return a descriptor of this process's standard input, and leave an empty one in its place."""
    taken = os.dup(0)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    return taken


def connect_to_parent() -> RpcServer:
    """Return the worker's end of the connection, and tie its life to the server's."""
    # A worker that outlived a killed server could write the same checkpoint as its successor.
    die_with_parent(signal.SIGKILL)
    return RpcServer(socket.socket(fileno=take_stdin()))


def serve(handlers: dict[str, Callable[..., Any]]) -> None:
    """Answer calls one at a time until the server disconnects.

    The rows of a handler that returns an iterator are streamed.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    rpc = connect_to_parent()
    handlers = {"ready": lambda: None, **handlers}
    while rpc.open:
        for call, method, params in rpc.poll(wait=True):
            if method == "cancel":  # calls run one after the other: it has finished already
                continue
            try:
                result = handlers[method](**params)
                if isinstance(result, Iterator):
                    for row in result:
                        rpc.send_row(call, row)
                    result = None
                rpc.send_result(call, result)
            except Exception as error:  # a bad request must not end the worker
                rpc.send_error(call, error)
