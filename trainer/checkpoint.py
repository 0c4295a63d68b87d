"""Checkpoints on disk: made whole or not at all, and never trusted without their sha256.

`checkpoints/0007/` holds the LoRA in PEFT form, the optimizer's state and `manifest.json`. It is
written in a temporary directory and renamed. No torch here, and nothing is unpickled.
"""

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kit.manifest import damage, read_manifest, write_manifest
from kit.state_dir import STEP_NAME, step_name
from trainer import faults
from trainer.errors import CheckpointError, DiskFull, NotFound

logger = logging.getLogger(__name__)


def path_of(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint of `step` is, or would be."""
    return checkpoints / step_name(step)


def list_steps(checkpoints: Path) -> list[int]:
    """Steps of the whole checkpoints, lowest first; a damaged one is named in the log."""
    steps = []
    for step in _steps_on_disk(checkpoints):
        if found := damage(path_of(checkpoints, step)):
            logger.warning("checkpoint %s is damaged and not used: %s", step, "; ".join(found))
        else:
            steps.append(step)
    return steps


def latest(checkpoints: Path) -> int | None:
    """The newest step whose files are whole, or None."""
    for step in reversed(_steps_on_disk(checkpoints)):
        if not (found := damage(path_of(checkpoints, step))):
            return step
        logger.warning("checkpoint %s is damaged and not used: %s", step, "; ".join(found))
    return None


def newest(checkpoints: Path) -> int | None:
    """The newest step on disk, whether or not its files are whole."""
    return max(_steps_on_disk(checkpoints), default=None)


def verify(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint at `path`; a damaged one raises, named."""
    if not path.is_dir():
        raise NotFound(f"There is no checkpoint `{path}`", hint="List them with `trainer models`")
    if found := damage(path):
        raise CheckpointError(
            f"The checkpoint `{path}` is damaged: {found[0]}",
            hint="Use the step before it, or pull it again",
        )
    manifest = read_manifest(path)
    assert manifest is not None  # `damage` has read it
    return manifest


def save(
    checkpoints: Path,
    step: int,
    write: Callable[[Path], dict[str, str] | None],
    about: dict[str, Any],
    *,
    synced: bool = True,
) -> Path:
    """Write checkpoint `step` with `write(directory)`; it appears whole or not at all.

    `write` may tell the sha256 of files that it has hashed already.
    A damaged checkpoint of the same step is replaced, a whole one is never touched. Until it is
    synced a power cut may damage it: leave that to `sync` where the step can be made again.
    """
    target = path_of(checkpoints, step)
    if target.is_dir() and not damage(target):
        raise CheckpointError(
            f"The checkpoint `{target}` exists already", hint="Delete it, or train from it"
        )
    temporary = None
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=checkpoints))
        hashes = write(temporary)
        write_manifest(temporary, {**about, "step": step}, hashes or {})
        temporary.chmod(0o755)
        if target.is_dir():
            shutil.rmtree(target)
        faults.reached("checkpoint-written")
        temporary.rename(target)
        faults.reached("checkpoint-renamed")
    except OSError as exc:
        raise _cannot_write(target, exc) from exc
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    if synced:
        sync(target)
    return target


def sync(path: Path) -> None:
    """Return once the checkpoint at `path` outlives a power cut, or was deleted meanwhile."""
    try:
        with ThreadPoolExecutor() as pool:  # a disk takes them all at once
            list(pool.map(_sync, [*path.rglob("*"), path, path.parent]))
    except FileNotFoundError:
        return
    except OSError as exc:
        raise _cannot_write(path, exc) from exc


def delete(checkpoints: Path, keep: Collection[int]) -> list[int]:
    """Delete every checkpoint whose step is not in `keep`, and return the deleted steps."""
    gone = [step for step in _steps_on_disk(checkpoints) if step not in set(keep)]
    for step in gone:
        # Renamed first: a crash half-way leaves no checkpoint that looks damaged.
        path = path_of(checkpoints, step)
        trash = path.with_name(f".{path.name}-deleted")
        shutil.rmtree(trash, ignore_errors=True)
        path.rename(trash)
        shutil.rmtree(trash)
    return gone


def steps_to_keep(
    steps: Collection[int], *, last: int, metrics: dict[int, float] | None = None, best: int = 0
) -> set[int]:
    """The `last` newest of `steps`, and the `best` ones by `metrics` (the higher, the better).

    The newest step is always among them: a run must be able to go on.
    """
    keep = set(sorted(steps)[-max(last, 1) :])
    ranked = sorted(
        (step for step in metrics or {} if step in steps),
        key=lambda step: ((metrics or {})[step], step),
        reverse=True,
    )
    return keep | set(ranked[:best])


def fork(source: Path, checkpoints: Path) -> int:
    """Copy the checkpoint at `source` into another run, which then goes on from its step."""
    manifest = verify(source)
    about = {key: value for key, value in manifest.items() if key not in ("files", "step")}
    step = int(manifest["step"])

    def copy(directory: Path) -> None:
        for name in manifest["files"]:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, directory / name)

    save(checkpoints, step, copy, {**about, "forked_from": str(source)})
    return step


def clean(checkpoints: Path) -> None:
    """Remove what a killed process left half made."""
    for path in checkpoints.glob(".[0-9]*-*"):
        shutil.rmtree(path, ignore_errors=True)


def _steps_on_disk(checkpoints: Path) -> list[int]:
    if not checkpoints.is_dir():
        return []
    return sorted(
        int(path.name)
        for path in checkpoints.iterdir()
        if STEP_NAME.fullmatch(path.name) and path.is_dir()
    )


def _cannot_write(path: Path, why: OSError) -> DiskFull:
    return DiskFull(
        f"The checkpoint `{path}` cannot be written: {why.strerror or why}",
        hint="Free disk space, or keep fewer checkpoints; the step before it is untouched",
    )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
