"""Bringing checkpoints home: fetch what is new, then trust nothing without its sha256."""

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
TOUCH = 60.0  # seconds
ROUNDS = 5  # of pulling before a cluster ends: a run that goes on need not keep it for ever


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
    """Copy checkpoints and metrics of `cluster` below `to`, verify and list its checkpoints.

    What else is below `to`, of other clusters and earlier ones, is neither touched nor looked at.
    """
    with (
        provider.writer(cluster, f"{CLUSTER_STATE_DIR}/{PULLED}") as write,
        _translated(to),
        tempfile.TemporaryDirectory() as directory,
    ):
        there = Path(directory)
        about = (f"{CHECKPOINT_GLOB}/{MANIFEST}", PULLED)
        provider.fetch(cluster, CLUSTER_STATE_DIR, there, about, checksum=False, progress=_quiet)
        places = [path.relative_to(there) for path in find(there)]
        for place in places:
            if _is_another(there / place, to / place):
                _set_aside(to / place.parent.parent)
        before = {place for place in places if not damage(to / place)}
        # By their names: what is finished from now on was not compared, and is the next pull's.
        patterns = [*(f"{glob.escape(str(place))}/**" for place in places), *_METRICS]

        noted, touched = _read(there / PULLED), time.monotonic()

        def telling(arrived: int, share: float) -> None:
            """A long pull is work: the note is written anew, else the server goes idle under it."""
            nonlocal touched
            if time.monotonic() - touched >= TOUCH:
                touched = time.monotonic()
                with contextlib.suppress(LauncherError):
                    write(noted)
            progress(arrived, share)

        def fetch(*, checksum: bool) -> list[str]:
            provider.fetch(
                cluster, CLUSTER_STATE_DIR, to, patterns, checksum=checksum, progress=telling
            )
            return [fault for place in present() for fault in damage(to / place)]

        def present() -> list[Path]:
            return [place for place in places if (to / place).is_dir()]  # not deleted since

        to.mkdir(parents=True, exist_ok=True)
        # Same size and time, other content: only a comparison of the content finds that.
        if fetch(checksum=False) and (faults := fetch(checksum=True)):
            raise DamagedCheckpoint(f"A checkpoint came home damaged: {faults[0]}")
        pulled = [_about(to / place, new=place not in before) for place in present()]
        safe = "".join(f"{checkpoint_name(it.path)}\n" for it in pulled)
        if safe != noted:  # also where an interrupted pull brought it, and not this
            write(safe)
    return pulled


def all_of(pull: Callable[[], list[PulledCheckpoint]]) -> list[PulledCheckpoint]:
    """Pull until it brings nothing: what was finished during a long pull is the next one's."""
    new: set[Path] = set()
    for _ in range(ROUNDS):
        pulled = pull()
        brought = {it.path for it in pulled if it.new}
        new |= brought
        if not brought:
            break
    return [replace(it, new=it.path in new) for it in pulled]


def watch(
    is_over: Callable[[], bool], pull: Callable[[], list[PulledCheckpoint]], every: float
) -> Iterator[list[PulledCheckpoint]]:
    """Pull every so many seconds until `is_over`; gives each pull that brought some.

    It is left alone for a night: once it has begun well, what fails is tried again.
    """
    begun = failing = False
    while True:
        try:
            over = is_over()  # before the pull: nothing is left behind
            pulled = pull()
        except (ProviderError, RemoteError, DamagedCheckpoint) as error:
            if not begun:
                raise
            if not failing:
                logger.warning("%s; trying again every %g s", error.message, every)
            failing = True
        else:
            begun, failing = True, False
            if over or any(checkpoint.new for checkpoint in pulled):
                yield pulled
            if over:
                return
        time.sleep(every)


@contextlib.contextmanager
def _translated(to: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise LauncherError(
            f"`{to}` cannot be written: {exc.strerror}",
            hint="Make room there, or choose another place with `--to`",
        ) from exc


def _is_another(there: Path, here: Path) -> bool:
    """Whether the checkpoint of that name here is an earlier run's."""
    theirs, ours = read_manifest(there), read_manifest(here)
    return bool(theirs and ours and theirs["files"] != ours["files"])


def _set_aside(model: Path) -> None:
    """Give an earlier run's directory another name: nothing is overwritten, no pull is refused."""
    number = next(
        n for n in itertools.count(1) if not model.with_name(f"{model.name}.{n}").exists()
    )
    aside = model.rename(model.with_name(f"{model.name}.{number}"))
    logger.warning("What an earlier run left in `%s` is in `%s` now", model, aside)


def _read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def _quiet(arrived: int, share: float) -> None:
    """Of what takes no time nobody is told."""


def metrics(directory: Path) -> list[Path]:
    """The files of metrics below `directory`."""
    return sorted(path for pattern in _METRICS for path in directory.glob(pattern))


def find(directory: Path) -> list[Path]:
    """The checkpoints below `directory`, in the order of their steps."""
    found = [
        path
        for path in directory.glob(CHECKPOINT_GLOB)
        if path.is_dir() and STEP_NAME.fullmatch(path.name)
    ]
    return sorted(found, key=lambda path: (path.parent, int(path.name)))


def _about(path: Path, *, new: bool) -> PulledCheckpoint:
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    project, model, step = checkpoint_name(path).split("/")
    return PulledCheckpoint(project, model, int(step), path, size, new)
