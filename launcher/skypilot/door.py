"""The door to SkyPilot: the only module that imports `sky`, and where its errors become ours.

SkyPilot's SDK queues requests: a call returns a request id, and `sky.get` raises the errors.
"""

import contextlib
import errno
import functools
import importlib
import io
import operator
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeVar

from kit.errors import KitError, NotInstalled
from kit.package_data import how_to_install
from launcher.errors import (
    ClusterNotFound,
    LauncherError,
    NoCapacity,
    NoCloud,
    ProviderError,
    TaskError,
)

# Set before the import, when SkyPilot reads it. Set it to 0 to report usage to SkyPilot.
os.environ.setdefault("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")

_NO_API_SERVER = (
    ProviderError,
    "SkyPilot's API server does not answer",
    "Start it with `sky api start`; `sky api info` shows which one is used",
)
# The name of SkyPilot's error: our error, its message and its hint. `{reason}` is the first line of
# SkyPilot's message.
_ERRORS: dict[str, tuple[type[LauncherError], str, str | None]] = {
    "ClusterDoesNotExist": (ClusterNotFound, "There is no cluster `{cluster}`", None),
    "NoCloudAccessError": (NoCloud, "SkyPilot has no access to any cloud", None),
    "ResourcesUnavailableError": (
        NoCapacity,
        "No capacity for cluster `{cluster}`: {reason}",
        None,
    ),
    "ResourcesMismatchError": (
        ProviderError,
        "Cluster `{cluster}` exists with other resources: {reason}",
        "Request the same resources, or end the cluster with `launcher down` first",
    ),
    "ClusterNotUpError": (
        ProviderError,
        "Cluster `{cluster}` is not up",
        "Bring it up with `launcher up -c {cluster}`, or end it with `launcher down -c {cluster}`",
    ),
    "ApiServerConnectionError": _NO_API_SERVER,
    "ConnectionError": _NO_API_SERVER,
    "ConnectTimeout": _NO_API_SERVER,
    "RequestCancelled": (
        ProviderError,
        "Another command cancelled SkyPilot's request for cluster `{cluster}`",
        "Run this command again",
    ),
    "ValueError": (TaskError, "SkyPilot does not accept this task: {reason}", None),
    "InvalidSkyPilotConfigError": (
        ProviderError,
        "SkyPilot's configuration is invalid: {reason}",
        "Fix `~/.sky/config.yaml`",
    ),
}
ANY = "*"
"""Stands for a cluster's name in `translated`, for calls that are not about one cluster."""
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_replacement: Any = None
Fake = TypeVar("Fake")


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments of `sky launch` into positional ones and options with their values."""
    positional = list(parse(launch_command(), list(arguments)).params["entrypoint"])
    options = list(arguments)
    for value in positional:
        last = len(options) - 1 - options[::-1].index(value)  # an option may have the same value
        del options[last]
    return positional, options


def sky() -> Any:
    """Return SkyPilot. Importing it takes seconds, so call this only where it is needed."""
    if _replacement is None:
        _wake_api_server()
    return _module()


def launch_command() -> Any:
    """Return the click command of `sky launch`."""
    return _module("client.cli.command").launch


@contextlib.contextmanager
def replaced(skypilot: Fake) -> Iterator[Fake]:
    """Use another object, such as a `FakeSky`, in place of SkyPilot."""
    global _replacement
    before, _replacement = _replacement, skypilot
    try:
        yield skypilot
    finally:
        _replacement = before


def installed(module: str = "") -> Any:
    """Import the installed SkyPilot, or a module of it that `import sky` may leave out."""
    missing = NotInstalled("SkyPilot is not installed", hint=how_to_install("sky"))
    try:
        import sky as skypilot
    except ModuleNotFoundError as exc:
        if exc.name != "sky":
            raise
        raise missing from exc
    if getattr(skypilot, "__file__", None) is None:
        # In a clone without SkyPilot, Python takes our folder of task YAMLs for the package.
        raise missing
    return importlib.import_module(f"sky.{module}") if module else skypilot


def _module(name: str = "") -> Any:
    if _replacement is None:
        return installed(name)
    return operator.attrgetter(name)(_replacement) if name else _replacement


def parse(launch: Any, arguments: list[str]) -> Any:
    """Parse arguments with the click command of `sky launch`, and return its context."""
    import click

    try:
        context = launch.make_context("sky launch", arguments)
    except click.ClickException as exc:
        raise LauncherError(
            f"`sky launch` does not accept these arguments: {exc.format_message()}",
            hint="See its options with `sky launch --help`",
        ) from exc
    if context.params["async_call"]:
        raise LauncherError(
            "`--async` would return before `launcher up` could start the server",
            hint="Leave it out; if you interrupt `launcher up`, the next one continues",
        )
    for name in ("workdir", "git_url", "git_ref"):
        if context.params.get(name):
            raise LauncherError(
                f"`--{name.replace('_', '-')}` would replace the directory that was checked",
                hint="Set `workdir` in a copy of the task, or run the command in that directory",
            )
    return context


@contextlib.contextmanager
def translated(cluster: str) -> Iterator[None]:
    """Turn SkyPilot's errors into ours, keeping the original as the cause.

    SkyPilot's own output goes to stderr, because stdout is for data. All threads share one stdout,
    so only the main thread redirects it.
    """
    is_main = threading.current_thread() is threading.main_thread()
    try:
        with contextlib.redirect_stdout(sys.stderr) if is_main else contextlib.nullcontext():
            yield
    except (KitError, KeyboardInterrupt):
        raise
    except Exception as exc:
        raise _ours(exc, cluster) from exc


def _ours(exc: Exception, cluster: str) -> LauncherError:
    lines = [_COLOR.sub("", line).strip() for line in str(exc).splitlines()]
    reason = next((line for line in lines if line), type(exc).__name__)
    subject = "SkyPilot failed" if cluster == ANY else "Cluster `{cluster}`"
    default = ProviderError, f"{subject}: {{reason}}", None
    names = [kind.__name__ for kind in type(exc).__mro__]
    error, message, hint = next((_ERRORS[name] for name in names if name in _ERRORS), default)
    values = {"cluster": cluster, "reason": reason}
    return error(message.format_map(values), hint=hint and hint.format_map(values))


@functools.cache
def _wake_api_server() -> None:
    """Start SkyPilot's API server if none answers.

    On a very busy machine it may end while it starts. Every call of the SDK starts it too, so the
    next call is the second attempt, and reports the error.
    """
    _hide_requests()
    with contextlib.suppress(LauncherError), translated(ANY):
        _module("server.common").check_server_healthy_or_start_fn()


def _hide_requests() -> None:
    """Let only this user read SkyPilot's database of requests, which holds the secrets of each."""
    with contextlib.suppress(OSError):  # it belongs to somebody else, or the disk is read-only
        directory = Path("~/.sky/api_server").expanduser()
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o700)


@contextlib.contextmanager
def log_stream(out: TextIO) -> Iterator["LogStream"]:
    """Give a stream to which SkyPilot can write a log; `BrokenPipeError` if `out` is closed."""
    stream = LogStream(out)
    try:
        yield stream
    except KeyboardInterrupt:
        if stream.is_broken:
            raise BrokenPipeError(errno.EPIPE, "the reader of the log has closed it") from None
        raise


class LogStream(io.TextIOBase):
    """Writes to `out`, and raises `KeyboardInterrupt` when `out` is a closed pipe.

    SkyPilot would take a `BrokenPipeError` for a lost connection and connect again and again. It
    does not catch an interrupt.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self.is_broken = False

    def write(self, text: str) -> int:
        with self._interrupting():
            return self._out.write(text)

    def flush(self) -> None:
        with self._interrupting():
            self._out.flush()

    @contextlib.contextmanager
    def _interrupting(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            self.is_broken = True
            raise KeyboardInterrupt from None


def write_alias(cluster: str) -> None:
    """Write the ssh alias of a cluster that is up, as `sky status` does. The SDK cannot do this."""
    command = _module("client.cli.command")
    with translated(cluster):
        command._get_cluster_records_and_set_ssh_config([cluster])


def forget_alias(cluster: str) -> None:
    """Remove the ssh alias. SkyPilot keeps that of a cluster that was never fully up."""
    _module("utils.cluster_utils").SSHConfigHelper.remove_cluster(cluster)
