"""Checkpoints on disk: written atomically, and used only if their sha256 match.

`checkpoints/0007/` holds the LoRA in PEFT form, the optimizer's state and `manifest.json`. It is
written to a temporary directory and then renamed. This module imports no torch and unpickles
nothing.
"""

import logging
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kit import files
from kit.manifest import damage, read_manifest, write_manifest
from kit.state_dir import STEP_NAME, step_name
from trainer import faults
from trainer.errors import CheckpointError, NotFound, StorageError, storage_error

logger = logging.getLogger(__name__)


def path_of(checkpoints: Path, step: int) -> Path:
    """Return the path of the checkpoint of `step`, whether or not it exists."""
    return checkpoints / step_name(step)


def steps_on_disk(checkpoints: Path) -> list[int]:
    """Return all steps on disk, damaged or not, lowest first."""
    if not checkpoints.is_dir():
        return []
    return sorted(
        int(path.name)
        for path in checkpoints.iterdir()
        if STEP_NAME.fullmatch(path.name) and path.is_dir()
    )


def list_steps(checkpoints: Path) -> list[int]:
    """Return the steps of undamaged checkpoints, lowest first; log the damaged ones."""
    return [step for step in steps_on_disk(checkpoints) if _is_undamaged(checkpoints, step)]


def latest(checkpoints: Path) -> int | None:
    """Return the newest undamaged step, or None."""
    steps = reversed(steps_on_disk(checkpoints))
    return next((step for step in steps if _is_undamaged(checkpoints, step)), None)


def check_latest(checkpoints: Path, wanted: int) -> None:
    """Raise unless `wanted` is the newest undamaged step, which the next one is trained from."""
    found = latest(checkpoints)
    if found != wanted:
        raise CheckpointError(
            f"The newest whole checkpoint in `{checkpoints}` is of step `{found}`, not `{wanted}`",
            hint="Put the one that is missing back, or restart the server",
        )


def _is_undamaged(checkpoints: Path, step: int) -> bool:
    faults = damage(path_of(checkpoints, step))
    if faults:
        logger.warning("checkpoint %s is damaged, skipping it: %s", step, "; ".join(faults))
    return not faults


def newest(checkpoints: Path) -> int | None:
    """Return the newest step on disk, damaged or not."""
    return max(steps_on_disk(checkpoints), default=None)


def verify(path: Path) -> dict[str, Any]:
    """Check the files of the checkpoint at `path`, and return its manifest."""
    if not path.is_dir():
        raise NotFound(f"There is no checkpoint `{path}`", hint="List them with `trainer models`")
    if faults := damage(path):
        raise CheckpointError(
            f"The checkpoint `{path}` is damaged: {faults[0]}",
            hint="Use the previous step, or pull it again",
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
    """Write checkpoint `step` with `write(directory)`; it appears complete or not at all.

    `write` may return the sha256 of files that it has already hashed. A damaged checkpoint of the
    same step is replaced; an undamaged one is never touched. Without `synced` a power cut may
    damage the checkpoint until `sync` is called: use that only if the step can be repeated.
    """
    target = path_of(checkpoints, step)
    if target.is_dir() and not damage(target):
        raise CheckpointError(
            f"The checkpoint `{target}` already exists", hint="Delete it, or train from it"
        )
    temporary = None
    try:
        files.make_directories(checkpoints)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=checkpoints))
        hashes = write(temporary)
        write_manifest(temporary, {**about, "step": step}, hashes or {})
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
    """Sync the checkpoint at `path` to disk, unless it has been deleted."""
    try:
        with ThreadPoolExecutor() as pool:  # a disk syncs many files at once
            list(pool.map(files.sync, [*path.rglob("*"), path, path.parent]))
    except FileNotFoundError:
        return
    except OSError as exc:
        raise _cannot_write(path, exc) from exc


def delete(checkpoints: Path, steps: Iterable[int]) -> None:
    """Delete the checkpoints of `steps` that are there."""
    for step in steps:
        # Rename it first, so that a crash in between leaves no damaged checkpoint.
        path = path_of(checkpoints, step)
        trash = path.with_name(f".{path.name}-deleted")
        try:
            shutil.rmtree(trash, ignore_errors=True)
            path.rename(trash)
            if trash.is_symlink():
                trash.unlink()  # never what it points to
            else:
                shutil.rmtree(trash)
        except FileNotFoundError:
            continue  # another request deletes it, too
        except OSError as exc:
            raise storage_error(exc, f"Cannot delete the checkpoint `{path}`") from exc


def steps_to_keep(
    steps: Collection[int], *, last: int, metrics: dict[int, float] | None = None, best: int = 0
) -> set[int]:
    """Return the `last` newest of `steps` and the `best` ones by `metrics` (higher is better).

    The newest step is always included, so that a run can continue.
    """
    keep = set(sorted(steps)[-max(last, 1) :])
    ranked = sorted(
        (step for step in metrics or {} if step in steps),
        key=lambda step: ((metrics or {})[step], step),
        reverse=True,
    )
    return keep | set(ranked[:best])


def fork(source: Path, checkpoints: Path) -> int:
    """Copy the checkpoint at `source` to another run, which continues from its step."""
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
    """Remove the unfinished checkpoints of a killed process."""
    for path in checkpoints.glob(".[0-9]*-*"):
        shutil.rmtree(path, ignore_errors=True)


def _cannot_write(path: Path, error: OSError) -> StorageError:
    return storage_error(error, f"Cannot write the checkpoint `{path}`")
