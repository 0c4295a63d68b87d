"""Waiting for a server: open its tunnel early, show its log, and explain why it did not start."""

import contextlib
import io
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Generic, Self, TextIO, TypeVar, cast

from launcher.errors import ProviderError
from launcher.provider import SETUP_FAILED, Provider, Run
from launcher.task import Task

T = TypeVar("T")


class Early(Generic[T]):
    """Enters `make()` beside the caller from `begin` on; `value` waits for what it gives.

    Closed at the end of the `with`, whether anybody asked for it or not.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[T]]) -> None:
        self._make = make
        self._pool = ThreadPoolExecutor(1)
        self._stack = contextlib.ExitStack()
        self._opened: Future[T] | None = None

    def begin(self) -> None:
        """Safe to repeat."""
        if self._opened is None:
            self._opened = self._pool.submit(lambda: self._stack.enter_context(self._make()))

    def value(self) -> T:
        self.begin()
        assert self._opened is not None
        return self._opened.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        self._stack.close()


class Showing:
    """Follows a log beside the caller, from `start` until the end of the `with`.

    `follow` is given what to write to, and is asked to stop by an error when it next writes.
    """

    def __init__(self, follow: Callable[[TextIO], None]) -> None:
        self._follow = follow
        self._valve: _Valve | None = None

    def start(self, out: TextIO) -> None:
        """Safe to repeat: one log is shown once."""
        if self._valve is None:
            self._valve = _Valve(out)
            threading.Thread(target=self._run, args=(self._valve,), daemon=True).start()

    def _run(self, valve: "_Valve") -> None:
        with contextlib.suppress(Exception):  # a log that cannot be shown stops nothing
            self._follow(cast(TextIO, valve))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._valve is not None:
            self._valve.open = False


class _Valve(io.TextIOBase):
    def __init__(self, out: TextIO) -> None:
        self._out = out
        self.open = True

    def write(self, text: str) -> int:
        if not self.open:
            raise RuntimeError("nobody looks any more")
        return self._out.write(text)

    def flush(self) -> None:
        if self.open:
            self._out.flush()


def kept(cluster: str, server: Run, task: Task, given: Sequence[str]) -> str:
    """That a server runs already, and what was given for a new one, without any value of it."""
    options = [f"`{it.partition('=')[0]}`" for it in given if it.startswith("-")]
    other = [f"`{task.path}`"] if server.name != task.name else []
    told = f"The server of cluster `{cluster}` runs already, with its first lease"
    if not (ignored := ", ".join(dict.fromkeys([*other, *options]))):
        return told
    return f"{told}; not applied, since the cluster exists: {ignored}"


def ended_early(provider: Provider, cluster: str, run_id: str) -> ProviderError:
    """Why a server is not there, by the last lines of its log."""
    out = io.StringIO()
    provider.logs(cluster, run_id, follow=False, tail=20, out=out)
    lines = [line.strip() for line in out.getvalue().splitlines() if line.strip()]
    see = f"See why with `launcher logs {run_id} -c {cluster}`"
    if any(SETUP_FAILED in line for line in lines):
        return ProviderError(
            f"The setup of cluster `{cluster}` failed",
            hint=f"{see}, mend it and launch again, or `launcher down -c {cluster}`",
        )
    last = f"`{lines[-1]}`" if lines else "it wrote nothing"
    return ProviderError(
        f"The server of cluster `{cluster}` ended before it was healthy: {last}", hint=see
    )
