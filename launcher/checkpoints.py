"""Pull checkpoints: fetch new files and check each one against its sha256."""

import contextlib
import glob
import itertools
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kit.manifest import MANIFEST, damage, read_manifest
from kit.state_dir import (
    CHECKPOINT_GLOB,
    CHECKPOINTS,
    EVALS_GLOB,
    HISTORY_GLOB,
    PULLED,
    ROLLOUT_GLOBS,
    STEP_NAME,
    checkpoint_name,
    ignore_in_git,
    model_path,
    names_in_path,
)
from launcher.errors import DamagedCheckpoint, LauncherError, ProviderError, RemoteError
from launcher.provider import CLUSTER_STATE_DIR, Progress, Provider
from launcher.task import Task

logger = logging.getLogger(__name__)
_HARNESS_METRICS, _HARNESS_PLOT = "training_metrics.jsonl", "reward_plot.png"
_COMPARED = (HISTORY_GLOB, f"*/{_HARNESS_METRICS}", EVALS_GLOB)
_METRICS = (*_COMPARED, f"*/{_HARNESS_PLOT}")
_SERVED = ".art-cluster/served"
TOUCH_INTERVAL = 60.0
"""Seconds between two writes of the `PULLED` file during a long pull."""
MAX_PULLS = 5
"""Most pulls before a cluster is torn down, so that a run that goes on cannot keep it up."""


@dataclass(frozen=True)
class PulledCheckpoint:
    """A checkpoint on this machine whose files match its manifest."""

    project: str
    model: str
    step: int
    path: Path
    bytes: int
    new: bool
    """Whether this pull fetched it."""


def pull(provider: Provider, cluster: str, to: Path, progress: Progress) -> list[PulledCheckpoint]:
    """Copy the checkpoints and metrics of `cluster` to `to`, and verify and list the checkpoints.

    Other files below `to`, such as those of other clusters, are ignored.
    """
    with (
        provider.writer(cluster, f"{CLUSTER_STATE_DIR}/{PULLED}") as write,
        _translate_errors(to),
        tempfile.TemporaryDirectory() as directory,
    ):
        manifests = Path(directory)
        patterns = [f"{CHECKPOINT_GLOB}/{MANIFEST}", PULLED, *_COMPARED]
        provider.fetch(
            cluster, CLUSTER_STATE_DIR, manifests, patterns, checksum=False, progress=_no_progress
        )
        places = [path.relative_to(manifests) for path in find(manifests)]
        for place in places:
            if _differs(manifests / place, to / place):
                _set_aside(to / place.parent.parent)
        _keep_other_metrics(manifests, to)
        before = {place for place in places if not damage(to / place)}
        # Name each checkpoint: one that is finished from now on was not compared with the copy
        # here, so the next pull fetches it.
        patterns = [
            *(f"{glob.escape(str(place))}/**" for place in places),
            *_METRICS,
            *ROLLOUT_GLOBS,
        ]
        recorded = _read(manifests / PULLED)
        report = _touching(progress, lambda: write(recorded))

        def fetch(*, checksum: bool) -> list[str]:
            provider.fetch(
                cluster, CLUSTER_STATE_DIR, to, patterns, checksum=checksum, progress=report
            )
            return [fault for place in present() for fault in damage(to / place)]

        def present() -> list[Path]:
            """The checkpoints that the server did not delete before they were fetched."""
            return [place for place in places if (to / place).is_dir()]

        if not to.exists():
            ignore_in_git(to)  # a later launch must not send them back
        to.mkdir(parents=True, exist_ok=True)
        # Damage that keeps the size and time of a file is only found by comparing its content.
        if fetch(checksum=False) and (faults := fetch(checksum=True)):
            raise DamagedCheckpoint(f"A pulled checkpoint is damaged: {faults[0]}")
        pulled = [_describe(to / place, new=place not in before) for place in present()]
        safe = "".join(f"{checkpoint_name(it.path)}\n" for it in pulled)
        if safe != recorded:  # also if an interrupted pull fetched them and could not record them
            write(safe)
    return pulled


def _touching(progress: Progress, touch: Callable[[], None]) -> Progress:
    """Call `touch` at the first bytes and every `TOUCH_INTERVAL` seconds.

    So the server does not go idle, and the cluster does not end, while bytes arrive.
    """
    touched = -TOUCH_INTERVAL

    def report(received: int, share: float) -> None:
        nonlocal touched
        if time.monotonic() - touched >= TOUCH_INTERVAL:
            touched = time.monotonic()
            with contextlib.suppress(LauncherError):
                touch()
        progress(received, share)

    return report


def pull_until_complete(pull: Callable[[], list[PulledCheckpoint]]) -> list[PulledCheckpoint]:
    """Repeat `pull` until it fetches nothing new: checkpoints may be finished during a pull."""
    new: set[Path] = set()
    for _ in range(MAX_PULLS):
        pulled = pull()
        fetched = {it.path for it in pulled if it.new}
        new |= fetched
        if not fetched:
            break
    return [replace(it, new=it.path in new) for it in pulled]


def watch(
    is_over: Callable[[], bool], pull: Callable[[], list[PulledCheckpoint]], interval: float
) -> Iterator[list[PulledCheckpoint]]:
    """Pull every `interval` seconds until `is_over`, and yield each pull that fetched something.

    A failure is retried after the first successful pull, so that a watch survives a night.
    """
    begun = failing = False
    while True:
        try:
            over = is_over()  # before the pull, so that the last pull fetches everything
            pulled = pull()
        except (ProviderError, RemoteError, DamagedCheckpoint) as error:
            if not begun:
                raise
            if not failing:
                logger.warning("%s; trying again every %g s", error.message, interval)
            failing = True
        else:
            begun, failing = True, False
            if over or any(checkpoint.new for checkpoint in pulled):
                yield pulled
            if over:
                return
        time.sleep(interval)


@contextlib.contextmanager
def _translate_errors(to: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise LauncherError(
            f"`{to}` cannot be written: {exc.strerror}",
            hint="Free some space, or choose another directory with `--to`",
        ) from exc


def _differs(remote: Path, local: Path) -> bool:
    """Whether the local checkpoint of the same name belongs to another run."""
    theirs, ours = read_manifest(remote), read_manifest(local)
    return bool(theirs and ours and theirs["files"] != ours["files"])


def _set_aside(path: Path) -> None:
    """Rename what belongs to an earlier run, so that a pull does not overwrite it."""
    stem, suffix = (path.stem, path.suffix) if path.is_file() else (path.name, "")
    names = (path.with_name(f"{stem}.{number}{suffix}") for number in itertools.count(1))
    aside = path.rename(next(name for name in names if not name.exists()))
    logger.warning("`%s` belongs to an earlier run and was renamed to `%s`", path, aside)


def _keep_other_metrics(remote: Path, to: Path) -> None:
    """Set metrics in `to` aside that do not begin those of the same name in `remote`."""
    for theirs in [*metrics(remote), *remote.glob(EVALS_GLOB)]:
        ours = to / theirs.relative_to(remote)
        # A run appends lines. The last one here may have been cut off while it was written.
        lines = ours.read_bytes().rpartition(b"\n")[0] if ours.is_file() else b""
        if theirs.read_bytes().startswith(lines):
            continue
        if ours.name == _HARNESS_METRICS:
            if (plot := ours.with_name(_HARNESS_PLOT)).is_file():
                _set_aside(plot)
            _set_aside(ours)
        elif theirs.match(EVALS_GLOB):
            _set_aside(ours)
        else:
            _set_aside(ours.parent)


def with_checkpoint(task: Task, path: Path) -> Task:
    """The same task with the pulled checkpoint at `path` sent along, which its server serves."""
    if int(task.config.get("num_nodes") or 1) > 1:
        raise LauncherError(
            f"`{task.path}` trains on several machines, and a checkpoint is served by one",
            hint="Use the task `art`",
        )
    project, name = names_in_path(path)
    place = f"~/{_SERVED}/{model_path(Path(), project, name) / CHECKPOINTS / path.resolve().name}"
    mounts = {place: str(path.resolve()), **(task.config.get("file_mounts") or {})}
    return replace(
        task,
        config={**task.config, "file_mounts": mounts},
        envs={**task.envs, "ART_CHECKPOINT": place},
    )


def base_model_of(path: Path) -> str:
    """The base model of the undamaged checkpoint at `path`."""
    if not (path / MANIFEST).is_file():
        raise LauncherError(
            f"`{path}` is not a checkpoint: it has no `{MANIFEST}`",
            hint="Name the directory of one step, such as "
            "`checkpoints/PROJECT/models/NAME/checkpoints/0024`",
        )
    if faults := damage(path):
        raise DamagedCheckpoint(f"The checkpoint `{path}` is damaged: {faults[0]}")
    return str((read_manifest(path) or {}).get("base_model") or "")


def _read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def _no_progress(received: int, share: float) -> None:
    """Short transfers report no progress."""


def metrics(directory: Path) -> list[Path]:
    """The metrics files below `directory`."""
    return sorted(path for pattern in _METRICS for path in directory.glob(pattern))


def find(directory: Path) -> list[Path]:
    """The checkpoints below `directory`, sorted by model and step."""
    found = [
        path
        for path in directory.glob(CHECKPOINT_GLOB)
        if path.is_dir() and STEP_NAME.fullmatch(path.name)
    ]
    return sorted(found, key=lambda path: (path.parent, int(path.name)))


def _describe(path: Path, *, new: bool) -> PulledCheckpoint:
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    project, model, step = checkpoint_name(path).split("/")
    return PulledCheckpoint(project, model, int(step), path, size, new)
