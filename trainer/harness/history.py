"""The files of a run, which `--resume` reads. They stay consistent if the program is killed.

`finetune_state.json` is the commit: rows of later epochs belong to an epoch that did not finish,
and are dropped. `pending_epoch.json` holds an epoch's trajectories from before they are submitted
until the epoch ends, so an interrupted epoch is trained exactly once, on what it had sampled. A
second file of this kind is for the epoch that is submitted meanwhile.
"""

import contextlib
import fcntl
import itertools
import logging
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from pydantic import TypeAdapter

from kit import json_text
from kit.errors import ConfigError
from kit.types import Json
from trainer.harness.curriculum import CurriculumState
from trainer.harness.metrics import read_json, read_jsonl, replace_file, write_json, write_jsonl
from trainer.harness.progress import LOG
from trainer.harness.sampled_groups import FILE as SAMPLED_GROUPS
from trainer.harness.sampled_groups import Position
from trainer.harness.types import TrajectoryCollection

logger = logging.getLogger(__name__)
STATE = "finetune_state.json"
PENDING = ("pending_epoch.json", "pending_epoch.2.json")
METRICS = "training_metrics.jsonl"
REWARDS = "reward_history.json"
VALIDATION = "validation_history.json"
CURRICULUM = "curriculum_state.json"
PLOT = "reward_plot.png"
FILES = (
    STATE,
    *PENDING,
    SAMPLED_GROUPS,
    METRICS,
    REWARDS,
    VALIDATION,
    CURRICULUM,
    PLOT,
    LOG,
)


@dataclass
class Pending:
    """An epoch that has been sampled but not trained yet."""

    epoch: int
    step: int | None
    """The step it is trained from; None if the TrainerAdapter does not report one."""
    row: Json
    """The epoch's metrics so far."""
    collection: TrajectoryCollection
    curriculum: Json
    """The curriculum's state after this epoch."""
    position: Position | None = None
    """The groups that are unused after this epoch; None if it took turns."""


@dataclass
class History:
    """All records of a run, in memory. `save` writes them to disk."""

    directory: Path
    run_id: str
    epoch: int = 0
    """Number of finished epochs."""
    idle: int = 0
    """Number of epochs since the last one that trained on something."""
    trained: int = 0
    """Number of epochs that trained on something."""
    curriculum: CurriculumState = field(default_factory=lambda: CurriculumState(1.0))
    position: Position | None = None
    """The groups that no epoch has used; None if no epoch was sampled ahead."""
    metrics: list[Json] = field(default_factory=list)
    rewards: list[Json] = field(default_factory=list)
    validation: list[Json] = field(default_factory=list)
    _files: dict[int, str] = field(default_factory=dict)
    """The file of each epoch that is under way."""

    def save(self) -> None:
        """Write the histories, then the state that commits them."""
        write_jsonl(self.directory / METRICS, self.metrics)
        write_json(self.directory / REWARDS, self.rewards)
        write_json(self.directory / VALIDATION, self.validation)
        write_json(self.directory / CURRICULUM, self.curriculum.as_json())
        write_json(
            self.directory / STATE,
            {
                "run_id": self.run_id,
                "epoch": self.epoch,
                "idle": self.idle,
                "trained": self.trained,
                "curriculum": self.curriculum.as_json(),
                **({"position": asdict(self.position)} if self.position else {}),
            },
        )

    def begin_training(self, pending: Pending) -> None:
        if pending.epoch not in self._files:
            used = list(self._files.values())  # in one step: another thread may end an epoch
            self._files[pending.epoch] = next(name for name in PENDING if name not in used)
        path = self.directory / self._files[pending.epoch]
        replace_file(path, json_text.dump(pending).decode())

    def end_training(self) -> None:
        """Forget the trajectories of the epoch that has just finished."""
        if name := self._files.get(self.epoch):
            (self.directory / name).unlink(missing_ok=True)
            del self._files[self.epoch]  # last: another thread may begin the next epoch

    def interrupted(self) -> list[Pending]:
        """Return the epochs that were sampled before a kill and not finished, in order.

        Without the first, the second is sampled again too: it was to be trained from its step.
        """
        found = {one.epoch: (name, one) for name in PENDING if (one := self._pending(name))}
        series = itertools.takewhile(found.__contains__, itertools.count(self.epoch + 1))
        self._files = {epoch: found[epoch][0] for epoch in series}
        return [found[epoch][1] for epoch in self._files]

    def _pending(self, name: str) -> Pending | None:
        try:
            saved = read_json(self.directory / name, None)
            if saved is None:
                return None
            pending = TypeAdapter(Pending).validate_python(saved)
            CurriculumState.from_json(pending.curriculum)
        except (ValueError, RecursionError):  # damaged: the epoch is sampled again
            logger.warning("`%s` is damaged and is not used", self.directory / name)
            return None
        return pending

    def unused(self, interrupted: Sequence[Pending]) -> Position | None:
        """Return the groups that no epoch has used, nor one that was interrupted.

        An epoch that took turns has no position, and used none of the groups sampled ahead.
        """
        positions = [one.position for one in interrupted if one.position]
        return positions[-1] if positions else self.position


def lock(directory: Path) -> IO[str]:
    """Lock the directory until the returned file is closed. Two runs would mix their files."""
    directory.mkdir(parents=True, exist_ok=True)
    file = (directory / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(
            f"Another run is writing to `{directory}`",
            hint="Wait until it ends, or set another `finetuning.output_dir`",
        ) from None
    return file


def resume(directory: Path) -> History | None:
    """Read the history of the run in `directory`, up to its last finished epoch."""
    try:
        return _resume(directory)
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        RecursionError,
    ) as exc:
        raise ConfigError(
            f"The files of the run in `{directory}` are damaged: {type(exc).__name__}",
            hint="Start a new run without `--resume`, which keeps these files in `previous`",
        ) from exc


def _resume(directory: Path) -> History | None:
    state = read_json(directory / STATE, None)
    if state is None:
        return None
    epoch = state["epoch"]

    def finished(rows: list[Json]) -> list[Json]:
        return [row for row in rows if row["epoch"] <= epoch]

    return History(
        directory,
        str(state["run_id"]),
        epoch=int(epoch),
        idle=int(state["idle"]),
        trained=int(state["trained"]),
        curriculum=CurriculumState.from_json(state["curriculum"]),
        position=TypeAdapter(Position | None).validate_python(state.get("position")),
        metrics=finished(read_jsonl(directory / METRICS)),
        rewards=finished(read_json(directory / REWARDS, [])),
        validation=finished(read_json(directory / VALIDATION, [])),
    )


def set_aside(directory: Path) -> Path | None:
    """Move an earlier run's files to `previous/RUN_ID`, so a new run starts clean."""
    files = [directory / name for name in FILES if (directory / name).exists()]
    if all(path.name == LOG for path in files):  # the log of the run that starts now
        return None
    run_id = "unknown"
    with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError, RecursionError):
        run_id = str(read_json(directory / STATE, None)["run_id"])
    if not re.fullmatch(r"[\w.-]+", run_id) or run_id in (".", ".."):
        run_id = "unknown"
    target = directory / "previous" / run_id
    target.mkdir(parents=True, exist_ok=True)
    for path in files:
        path.replace(target / path.name)
    return target
