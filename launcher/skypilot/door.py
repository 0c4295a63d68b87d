"""The door to SkyPilot: the only module that imports `sky`, and the place its errors become ours.

SkyPilot's SDK only queues: every call returns a request id, and its errors surface in `sky.get`.
"""

import contextlib
import errno
import importlib
import io
import operator
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, TextIO, TypeVar

from kit.errors import KitError, NotInstalled
from launcher.errors import (
    ClusterNotFound,
    LauncherError,
    NoCapacity,
    NoCloud,
    ProviderError,
    TaskError,
)

# Before SkyPilot is imported: it reads this once. Whoever wants to report usage sets it to 0.
os.environ.setdefault("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")

_DEAD = (
    ProviderError,
    "SkyPilot's API server does not answer",
    ("Start it with `sky api start`, and see which one is asked with `sky api info`"),
)
# By the name of SkyPilot's error: ours, what happened and what to do. `{what}` is its first line.
_ERRORS: dict[str, tuple[type[LauncherError], str, str | None]] = {
    "ClusterDoesNotExist": (ClusterNotFound, "There is no cluster `{cluster}`", None),
    "NoCloudAccessError": (NoCloud, "SkyPilot may use no cloud yet", None),
    "ResourcesUnavailableError": (NoCapacity, "Nobody has what `{cluster}` asks for: {what}", None),
    "ResourcesMismatchError": (
        ProviderError,
        "Cluster `{cluster}` is there with other resources: {what}",
        "Leave the resources as they are, or end it with `launcher down` first",
    ),
    "ClusterNotUpError": (
        ProviderError,
        "Cluster `{cluster}` is not up",
        "Finish it with `launcher up -c {cluster}`, or end it with `launcher down -c {cluster}`",
    ),
    "ApiServerConnectionError": _DEAD,
    "ConnectionError": _DEAD,
    "ConnectTimeout": _DEAD,
    "RequestCancelled": (
        ProviderError,
        "Another command cancelled what SkyPilot did for cluster `{cluster}`",
        "Run this one again",
    ),
    "ValueError": (TaskError, "SkyPilot does not take this task: {what}", None),
    "InvalidSkyPilotConfigError": (
        ProviderError,
        "SkyPilot's configuration is wrong: {what}",
        "Mend `~/.sky/config.yaml`",
    ),
}
ANY = "*"
"""In place of a cluster's name, where something is asked of SkyPilot that is not about one."""
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_replacement: Any = None
Fake = TypeVar("Fake")


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part arguments of `sky launch` into the positional ones and the options with their values."""
    positional = list(parse(launch_command(), list(arguments)).params["entrypoint"])
    options = list(arguments)
    for value in positional:
        last = len(options) - 1 - options[::-1].index(value)  # options may hold the same word
        del options[last]
    return positional, options


def sky() -> Any:
    """Return SkyPilot. Importing it takes seconds, so call this only where it is needed."""
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
    import sky as skypilot

    if getattr(skypilot, "__file__", None) is None:
        # Without SkyPilot, Python takes our folder of task YAMLs for the package.
        raise NotInstalled("SkyPilot is not installed", hint="Install it with `scripts/install`")
    return importlib.import_module(f"sky.{module}") if module else skypilot


def _module(name: str = "") -> Any:
    if _replacement is None:
        return installed(name)
    return operator.attrgetter(name)(_replacement) if name else _replacement


def parse(launch: Any, arguments: list[str]) -> Any:
    import click

    try:
        context = launch.make_context("sky launch", arguments)
    except click.ClickException as exc:
        raise LauncherError(
            f"`sky launch` does not take these arguments: {exc.format_message()}",
            hint="See what it takes with `sky launch --help`",
        ) from exc
    if context.params["async_call"]:
        raise LauncherError(
            "`--async` would leave before the server starts, which `launcher up` does itself",
            hint="Leave it out; what was interrupted goes on with the next `launcher up`",
        )
    return context


@contextlib.contextmanager
def translated(cluster: str) -> Iterator[None]:
    """Turn SkyPilot's errors into ours, keeping the original as the cause.

    What it prints goes to stderr: it is for people, and stdout is for data. All threads share one
    stdout, so only the main one moves it.
    """
    main = threading.current_thread() is threading.main_thread()
    try:
        with contextlib.redirect_stdout(sys.stderr) if main else contextlib.nullcontext():
            yield
    except (KitError, KeyboardInterrupt):
        raise
    except Exception as exc:
        raise _ours(exc, cluster) from exc


def _ours(exc: Exception, cluster: str) -> LauncherError:
    lines = [_COLOR.sub("", line).strip() for line in str(exc).splitlines()]
    what = next((line for line in lines if line), type(exc).__name__)
    about = "SkyPilot failed" if cluster == ANY else "Cluster `{cluster}`"
    default = ProviderError, f"{about}: {{what}}", None
    names = [kind.__name__ for kind in type(exc).__mro__]
    error, message, hint = next((_ERRORS[name] for name in names if name in _ERRORS), default)
    where = {"cluster": cluster, "what": what}
    return error(message.format_map(where), hint=hint and hint.format_map(where))


@contextlib.contextmanager
def reading(out: TextIO) -> Iterator["Reader"]:
    """Gives what SkyPilot may write a log for `out` to; `BrokenPipeError` when nobody reads it."""
    reader = Reader(out)
    try:
        yield reader
    except KeyboardInterrupt:
        if reader.gone:
            raise BrokenPipeError(errno.EPIPE, "nobody reads the log any more") from None
        raise


class Reader(io.TextIOBase):
    """`out` as SkyPilot may write to it, which takes a closed pipe for a lost connection.

    It would connect again and again; an interrupt is what it lets pass.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self.gone = False

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
            self.gone = True
            raise KeyboardInterrupt from None


def write_alias(cluster: str) -> None:
    """Write the ssh alias of a cluster that is up, as `sky status` does; the SDK cannot."""
    command = _module("client.cli.command")
    with translated(cluster):
        command._get_cluster_records_and_set_ssh_config([cluster])


def forget_alias(cluster: str) -> None:
    """Remove the ssh alias, which SkyPilot keeps where a cluster was never whole."""
    _module("utils.cluster_utils").SSHConfigHelper.remove_cluster(cluster)
