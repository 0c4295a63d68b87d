"""Waiting for a server: open its tunnel early, show its log, and explain why it did not start."""

import contextlib
import io
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Generic, Self, TextIO, TypeVar, cast

from kit.state_dir import PRICE
from launcher.endpoints import Endpoints, is_healthy
from launcher.errors import LauncherError, ProviderError
from launcher.provider import CLUSTER_STATE_DIR, SETUP_FAILED, Cost, Provider, Run, RunStatus
from launcher.task import Task

T = TypeVar("T")
_PREFIX = re.compile(r"^\([^()]*pid=\d+[^()]*\) ?")  # SkyPilot's, of each line of a log
_ERROR = re.compile(r"\s*(error\b|E:|fatal:|Traceback \(|\w*Error:|.*: command not found)", re.I)
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


@contextlib.contextmanager
def naming_the_cluster(
    provider: Provider, cluster: str, progress: Callable[[str], None]
) -> Iterator[None]:
    """Name the cluster that a launch leaves behind if it fails or is interrupted."""
    down = f"end it with `launcher down{provider.option} -c {cluster}`"
    try:
        yield
    except LauncherError as error:
        try:
            exists = "still exists" * any(it.name == cluster for it in provider.clusters())
        except LauncherError:
            exists = "may still exist"
        if not exists or "launcher down" in (error.hint or ""):
            raise
        hint = f"Cluster `{cluster}` {exists}: {down}"
        raise type(error)(
            error.message, hint=f"{error.hint}. {hint}" if error.hint else hint
        ) from error
    except KeyboardInterrupt:
        # A provider may take minutes to answer: whoever interrupts does not want to wait for it.
        progress(
            f"Interrupted: cluster `{cluster}` may exist. Continue with the same command, or {down}"
        )
        raise


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
    if lines and _PREFIX.sub("", lines[-1]).startswith(INSTALLING):
        return "Installing the server's environment"
    return "Setting up the server"


def wait_for_server(
    provider: Provider,
    cluster: str,
    server: Run,
    tunnel: BackgroundContext[Endpoints],
    progress: Callable[[str], None],
    log: TextIO | None,
    interval: float,
) -> None:
    """Wait until the server is healthy, without a time limit while its run is alive.

    A setup may take long. See `Cluster.up` for `progress`, `log` and `interval`.
    """
    started = time.monotonic()
    with LogFollower(
        lambda out: provider.logs(cluster, server.id, follow=True, tail=0, out=out)
    ) as follower:
        while True:
            endpoints, next_check = tunnel.value(), time.monotonic() + interval
            while time.monotonic() < next_check:
                if is_healthy(endpoints):
                    return
                time.sleep(0.3)
            run = next((it for it in provider.runs(cluster) if it.id == server.id), None)
            if run is None or run.status.over:
                raise startup_error(provider, cluster, server.id)
            doing = activity(provider, cluster, run, log_shown=log is not None)
            progress(f"{doing}… {time.monotonic() - started:.0f} s")
            if log is not None and run.status is not RunStatus.PENDING:
                follower.start(log)


def startup_error(provider: Provider, cluster: str, run_id: str) -> ProviderError:
    """Return the error that explains, from the end of its log, why a server did not start."""
    lines = _last_lines(provider, cluster, run_id, 100)
    see_log = f"See why with `launcher logs {run_id}{provider.option} -c {cluster}`"
    if any(SETUP_FAILED in line for line in lines):
        return ProviderError(
            f"The setup of cluster `{cluster}` failed{quoted(lines)}",
            hint=f"{see_log}, fix it and launch again, "
            f"or `launcher down{provider.option} -c {cluster}`",
        )
    last = f"`{lines[-1].strip()}`" if lines else "its log is empty"
    return ProviderError(
        f"The server of cluster `{cluster}` exited before it was healthy: {last}", hint=see_log
    )


def quoted(lines: Sequence[str]) -> str:
    """The lines of a setup's log that say why it failed, to follow a sentence.

    They are the last error and what follows it, or the last lines if no error is marked.
    """
    end = next((at for at, line in enumerate(lines) if SETUP_FAILED in line), len(lines))
    said = [_PREFIX.sub("", line) for line in lines[:end]]
    said = [line for line in said if line.strip() and not line.startswith(INSTALLING)]
    errors = [at for at, line in enumerate(said) if _ERROR.match(line)]
    # uv's error is followed by ours, which alone says little: the last two.
    shown = said[errors[-2 if len(errors) > 1 else -1] :] if errors else said[-5:]
    return ":\n" + "\n".join(f"  {line[:500]}" for line in shown[:12]) if shown else ""


def _last_lines(provider: Provider, cluster: str, run_id: str, count: int = 20) -> list[str]:
    out = io.StringIO()
    provider.logs(cluster, run_id, follow=False, tail=count, out=out)
    return [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]


def write_price(provider: Provider, name: str, cost: Callable[[], Cost]) -> None:
    """Tell the server what the cluster costs, for its page, which works without it too."""
    with contextlib.suppress(LauncherError, OSError):
        price = cost().per_hour
        if price > 0:
            with provider.writer(name, f"{CLUSTER_STATE_DIR}/{PRICE}") as write:
                write(f"{price:.4f}\n")
