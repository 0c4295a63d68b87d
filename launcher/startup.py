"""Waiting for a server: open its tunnel early, show its log, and explain why it did not start."""

import contextlib
import io
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Generic, Self, TextIO, TypeVar, cast

from launcher.errors import ProviderError
from launcher.provider import SETUP_FAILED, Provider, Run, RunStatus
from launcher.task import Task

T = TypeVar("T")
INSTALLING = "Installing "  # starts each line that `scripts/install` writes while it works


class BackgroundContext(Generic[T]):
    """Enters the context manager that `make` returns in a thread, from `start` on.

    It is exited at the end of the `with`, whether `value` was called or not.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[T]]) -> None:
        self._make = make
        self._pool = ThreadPoolExecutor(1)
        self._stack = contextlib.ExitStack()
        self._entered: Future[T] | None = None

    def start(self) -> None:
        """Safe to repeat."""
        if self._entered is None:
            self._entered = self._pool.submit(lambda: self._stack.enter_context(self._make()))

    def value(self) -> T:
        """Return the context's value, as soon as it is entered."""
        self.start()
        assert self._entered is not None
        return self._entered.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        self._stack.close()


class LogFollower:
    """Follows a log in a thread, from `start` until the end of the `with`.

    `follow` gets the stream to write to. Its first write after the end raises an error.
    """

    def __init__(self, follow: Callable[[TextIO], None]) -> None:
        self._follow = follow
        self._stream: _ClosableStream | None = None

    def start(self, out: TextIO) -> None:
        """Safe to repeat: the log is shown once."""
        if self._stream is None:
            self._stream = _ClosableStream(out)
            threading.Thread(target=self._run, args=(self._stream,), daemon=True).start()

    def _run(self, stream: "_ClosableStream") -> None:
        with contextlib.suppress(Exception):  # a log that cannot be shown stops nothing
            self._follow(cast(TextIO, stream))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.is_open = False


class _ClosableStream(io.TextIOBase):
    """Writes to `out` until it is closed, and leaves `out` open."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self.is_open = True

    def write(self, text: str) -> int:
        if not self.is_open:
            raise RuntimeError("the log is not shown any more")
        return self._out.write(text)

    def flush(self) -> None:
        if self.is_open:
            self._out.flush()


def already_running(cluster: str, server: Run, task: Task, given: Sequence[str]) -> str:
    """Say that a server runs already, and name the ignored arguments without their values."""
    options = [f"`{argument.partition('=')[0]}`" for argument in given if argument.startswith("-")]
    other_task = [f"`{task.path}`"] if server.name != task.name else []
    ignored = ", ".join(dict.fromkeys([*other_task, *options]))
    message = f"The server of cluster `{cluster}` is already running, with its original lease"
    if not ignored:
        return message
    return f"{message}; not applied, because the cluster exists: {ignored}"


def activity(provider: Provider, cluster: str, run: Run, *, log_shown: bool) -> str:
    """Say what a server that is not healthy yet is doing."""
    if run.status is RunStatus.PENDING:
        return "Waiting in the cluster's queue"
    # A log that the user sees already says more, and reading it again may need an ssh.
    lines = [] if log_shown else _last_lines(provider, cluster, run.id)
    if lines and lines[-1].startswith(INSTALLING):
        return "Installing the server's environment"
    return "Setting up the server"


def startup_error(provider: Provider, cluster: str, run_id: str) -> ProviderError:
    """Return the error that explains, from the end of its log, why a server did not start."""
    lines = _last_lines(provider, cluster, run_id)
    see_log = f"See why with `launcher logs {run_id} -c {cluster}`"
    if any(SETUP_FAILED in line for line in lines):
        return ProviderError(
            f"The setup of cluster `{cluster}` failed",
            hint=f"{see_log}, fix it and launch again, or `launcher down -c {cluster}`",
        )
    last = f"`{lines[-1]}`" if lines else "its log is empty"
    return ProviderError(
        f"The server of cluster `{cluster}` exited before it was healthy: {last}", hint=see_log
    )


def _last_lines(provider: Provider, cluster: str, run_id: str) -> list[str]:
    out = io.StringIO()
    provider.logs(cluster, run_id, follow=False, tail=20, out=out)
    return [line.strip() for line in out.getvalue().splitlines() if line.strip()]
