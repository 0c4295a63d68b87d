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
from kit.state_dir import CHECKPOINT_GLOB, HISTORY_GLOB, PULLED, STEP_NAME, checkpoint_name
from launcher.errors import DamagedCheckpoint, LauncherError, ProviderError, RemoteError
from launcher.provider import CLUSTER_STATE_DIR, Progress, Provider

logger = logging.getLogger(__name__)
_METRICS = (HISTORY_GLOB, "*/training_metrics.jsonl", "*/reward_plot.png")
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
        patterns = [f"{CHECKPOINT_GLOB}/{MANIFEST}", PULLED]
        provider.fetch(
            cluster, CLUSTER_STATE_DIR, manifests, patterns, checksum=False, progress=_no_progress
        )
        places = [path.relative_to(manifests) for path in find(manifests)]
        for place in places:
            if _differs(manifests / place, to / place):
                _set_aside(to / place.parent.parent)
        before = {place for place in places if not damage(to / place)}
        # Name each checkpoint: one that is finished from now on was not compared with the copy
        # here, so the next pull fetches it.
        patterns = [*(f"{glob.escape(str(place))}/**" for place in places), *_METRICS]
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
    """Call `touch` every `TOUCH_INTERVAL` seconds, so that the server does not go idle."""
    touched = time.monotonic()

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


def _set_aside(model: Path) -> None:
    """Rename the directory of an earlier run, so that a pull does not overwrite it."""
    number = next(
        n for n in itertools.count(1) if not model.with_name(f"{model.name}.{n}").exists()
    )
    aside = model.rename(model.with_name(f"{model.name}.{number}"))
    logger.warning("`%s` belongs to an earlier run and was renamed to `%s`", model, aside)


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
