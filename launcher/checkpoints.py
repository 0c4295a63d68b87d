"""Bringing checkpoints home: fetch what is new, then trust nothing without its sha256."""

import re
from dataclasses import dataclass
from pathlib import Path

from kit.manifest import damage
from launcher.errors import DamagedCheckpoint, LauncherError
from launcher.provider import STATE_DIR, Provider

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


def pull(provider: Provider, cluster: str, to: Path) -> list[PulledCheckpoint]:
    """Copy the checkpoints of `cluster` below `to`, verify each, and list all that are there."""
    before = set(find(to))
    try:
        to.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise LauncherError(
            f"`{to}` cannot be written: {exc.strerror}", hint="Choose another with `--to`"
        ) from exc
    provider.fetch(cluster, STATE_DIR, to, checksum=False)
    if any(damage(path) for path in find(to)):
        # Same size and time, other content: only a comparison of the content finds that.
        provider.fetch(cluster, STATE_DIR, to, checksum=True)
    return [_verified(path, new=path not in before) for path in find(to)]


def find(directory: Path) -> list[Path]:
    """The checkpoints below `directory`, in the order of their steps."""
    found = [
        path
        for path in directory.glob("*/models/*/checkpoints/*")
        if path.is_dir() and _STEP.fullmatch(path.name)
    ]
    return sorted(found, key=lambda path: (path.parent, int(path.name)))


def _verified(path: Path, *, new: bool) -> PulledCheckpoint:
    if found := damage(path):
        raise DamagedCheckpoint(f"A checkpoint came home damaged: {found[0]}")
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    project, _, model, _, step = path.parts[-5:]
    return PulledCheckpoint(project, model, int(step), path, size, new)
