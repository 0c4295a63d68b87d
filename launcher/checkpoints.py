"""Bringing checkpoints home: fetch what is new, then trust nothing without its sha256."""

import re
from dataclasses import dataclass
from pathlib import Path

from kit.manifest import damage
from launcher.errors import DamagedCheckpoint, LauncherError
from launcher.provider import STATE_DIR, Progress, Provider

# Finished checkpoints only: the server writes into a directory whose name starts with a dot.
_CHECKPOINTS = "*/models/*/checkpoints/[0-9]*/**"
_METRICS = ("*/models/*/history.jsonl", "*/training_metrics.jsonl", "*/reward_plot.png")
PULLED = f"{STATE_DIR}/pulled"
"""Where the server finds what is safe at home: `PROJECT/NAME/STEP` a line."""

# `0007`; the server writes into `.0007-xyz` and renames, so other names are not finished.
_STEP = re.compile(r"\d{4,}")


@dataclass(frozen=True)
class PulledCheckpoint:
    """A checkpoint on this machine whose files match its manifest."""

    project: str
    model: str
    step: int
    path: Path
    bytes: int
    new: bool
    """Whether this pull brought it."""


def pull(provider: Provider, cluster: str, to: Path, progress: Progress) -> list[PulledCheckpoint]:
    """Copy checkpoints and metrics of `cluster` below `to`, verify, and list all that are there."""
    before = {path for path in find(to) if not damage(path)}

    def fetch(*, checksum: bool) -> None:
        patterns = (_CHECKPOINTS, *_METRICS)
        provider.fetch(cluster, STATE_DIR, to, patterns, checksum=checksum, progress=progress)

    with provider.writing(cluster, PULLED) as write:
        try:
            to.mkdir(parents=True, exist_ok=True)
            fetch(checksum=False)
            faults = {path: damage(path) for path in find(to)}
            if any(faults.values()):
                # Same size and time, other content: only a comparison of the content finds that.
                fetch(checksum=True)
                faults = {path: damage(path) for path in find(to)}
        except OSError as exc:
            raise LauncherError(
                f"`{to}` cannot be written: {exc.strerror}",
                hint="Make room there, or choose another place with `--to`",
            ) from exc
        for fault in (fault for found in faults.values() for fault in found):
            raise DamagedCheckpoint(f"A checkpoint came home damaged: {fault}")
        pulled = [_about(path, new=path not in before) for path in faults]
        if any(checkpoint.new for checkpoint in pulled):
            write("".join(f"{it.project}/{it.model}/{it.step:04}\n" for it in pulled))
    return pulled


def metrics(directory: Path) -> list[Path]:
    """The files of metrics below `directory`."""
    return sorted(path for pattern in _METRICS for path in directory.glob(pattern))


def find(directory: Path) -> list[Path]:
    """The checkpoints below `directory`, in the order of their steps."""
    found = [
        path
        for path in directory.glob("*/models/*/checkpoints/*")
        if path.is_dir() and _STEP.fullmatch(path.name)
    ]
    return sorted(found, key=lambda path: (path.parent, int(path.name)))


def _about(path: Path, *, new: bool) -> PulledCheckpoint:
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    project, _, model, _, step = path.parts[-5:]
    return PulledCheckpoint(project, model, int(step), path, size, new)
