"""rsync: one transfer to or from a cluster, with its progress and our errors for its failures."""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from kit.errors import NotInstalled
from launcher.errors import RemoteError, Unreachable

_VANISHED = 24  # a file was deleted during the transfer; the manifest shows whether it matters
_PROGRESS = re.compile(r"^\s*([\d,]+)\s+(\d+)%")


def transfer(
    arguments: Sequence[str], cluster: str, on_line: Callable[[str], None], *, place: str
) -> None:
    """Run rsync and pass each line that it prints to `on_line`; error messages name `place`."""
    with tempfile.TemporaryFile("w+") as errors:
        try:
            process = subprocess.Popen(
                ["rsync", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        except FileNotFoundError as exc:
            raise NotInstalled("rsync is not installed", hint="Install `rsync`") from exc
        with process:
            try:
                assert process.stdout is not None
                for line in _lines(process.stdout):
                    on_line(line)
                code = process.wait()
            except BaseException:
                process.terminate()  # Ctrl-C or our own error; files that arrived stay
                raise
        if code not in (0, _VANISHED):
            errors.seek(0)
            _fail(errors.read(), code, cluster, place)


def progress_of(line: str) -> tuple[int, float] | None:
    """Bytes and share, from 0 to 1, in a line of `--info=progress2`; None if it has none."""
    found = _PROGRESS.match(line)
    return (int(found[1].replace(",", "")), int(found[2]) / 100) if found else None


def rules(patterns: Sequence[str]) -> list[str]:
    """Filter options that include only the files of `patterns` (see `Provider.fetch`)."""
    includes: dict[str, None] = {}
    for pattern in patterns:
        *parents, last = pattern.split("/")
        for depth in range(len(parents)):
            includes["--include=/" + "/".join(parents[: depth + 1]) + "/"] = None
        path = "/".join([*parents, "***" if last == "**" else last])
        includes[f"--include=/{path}"] = None
    return [*includes, "--exclude=*", "--prune-empty-dirs"]


def _lines(stream: IO[bytes]) -> Iterator[str]:
    """Yield each line as soon as it is complete. A carriage return ends a progress line."""
    rest = b""
    while chunk := stream.read1(65536):  # type: ignore[attr-defined]
        *whole, rest = re.split(rb"[\r\n]", rest + chunk)
        yield from (line.decode(errors="replace") for line in whole if line)
    if rest:
        yield rest.decode(errors="replace")


def _fail(errors: str, code: int, cluster: str, place: str) -> None:
    if "change_dir" in errors and "No such file or directory" in errors:
        return  # the source does not exist: the cluster has made nothing yet
    if "No space left on device" in errors or "Disk quota exceeded" in errors:
        raise RemoteError(
            f"{place} is full", hint="Free some space and run the command again; it continues"
        )
    lines = [line for line in errors.splitlines() if line.strip()]
    default = f"rsync exited with code {code}"
    reason = next((line for line in lines if line.startswith("rsync")), default)
    raise Unreachable(
        f"The transfer with cluster `{cluster}` failed: {reason}",
        hint="Run the command again; it continues where it stopped",
    )
