"""Groups that are sampled but not trained yet, in memory and in `sampled_groups.jsonl`.

A group is in the file before it may be trained. `Position` says which groups of the file were
handed over to an epoch, and is committed with that epoch: a killed program loses no sampled group,
and trains none twice.
"""

import logging
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pydantic

from kit import json_text
from kit.files import append_lines, read_lines, replace_text, sync
from kit.types import Json
from trainer.harness.types import Failure, LostRun, Stored, Trajectory

logger = logging.getLogger(__name__)
FILE = "sampled_groups.jsonl"


class SampledGroup(Stored):
    """The scored runs of one example."""

    number: int
    """Its place in the series of all groups of the run."""
    trajectories: list[Trajectory]
    sampled_by: list[int]
    """For each trajectory, the step that sampled its oldest choice."""
    lost: list[LostRun]
    records: list[Json]
    """A row of each run, for the file in `eval.general.output_dir`."""

    @property
    def rewards(self) -> list[float]:
        return [trajectory.reward for trajectory in self.trajectories]

    @property
    def oldest(self) -> int:
        """The step that sampled its oldest choice."""
        return min(self.sampled_by)

    def without_stale(self, step: int, max_age: int) -> "SampledGroup":
        """Return the group with the trajectories older than `max_age` steps as lost runs."""
        ages = [step - sampled_by for sampled_by in self.sampled_by]
        if all(age <= max_age for age in ages):
            return self
        fresh = [index for index, age in enumerate(ages) if age <= max_age]
        errors = {
            (trajectory.metadata or {}).get("generation"): stale_error(age)
            for trajectory, age in zip(self.trajectories, ages, strict=True)
            if age > max_age
        }
        example = str((self.trajectories[0].metadata or {}).get("example_id", ""))
        stale = Failure.STALE.value
        lost = [
            LostRun(example_id=example, reason=stale, error=text, group=self.number)
            for text in errors.values()
        ]
        return SampledGroup(
            number=self.number,
            trajectories=[self.trajectories[index] for index in fresh],
            sampled_by=[self.sampled_by[index] for index in fresh],
            lost=[*self.lost, *lost],
            records=[
                row
                if row["generation"] not in errors
                else {**row, "failure": stale, "error": errors[row["generation"]]}
                for row in self.records
            ],
        )


def ages(groups: Iterable[SampledGroup], step: int) -> dict[str, float]:
    """Return the mean and the largest number of steps since the groups' runs were sampled."""
    found = [step - sampled_by for group in groups for sampled_by in group.sampled_by]
    if not found:
        return {}
    return {"policy_age/mean": sum(found) / len(found), "policy_age/max": max(found)}


def stale_error(age: int) -> str:
    steps = "1 step was" if age == 1 else f"{age} steps were"
    return f"{steps} trained since its oldest choice was sampled"


@dataclass
class Position:
    """Which groups of the series no epoch has used yet: those of `open`, and from `next` on."""

    next: int = 0
    open: list[int] = field(default_factory=list)

    def has_used(self, number: int) -> bool:
        return number < self.next and number not in self.open


class GroupFile:
    """`sampled_groups.jsonl`. Groups that an epoch has used may stay in it for a while."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE
        self._lines: dict[int, bytes] = {}
        """The groups in the file by number, as they stand there."""

    def append(self, group: SampledGroup) -> None:
        """Write a group durably; only then may it be trained."""
        line = self._lines[group.number] = json_text.dump(group)
        append_lines(self.path, [line])
        sync(self.path)

    def keep(self, numbers: Iterable[int]) -> None:
        """Replace the file by one with these groups only."""
        self._lines = {number: self._lines[number] for number in numbers}
        replace_text(self.path, "".join(f"{line.decode()}\n" for line in self._lines.values()))

    def read(self, position: Position) -> dict[int, SampledGroup]:
        """Return the groups that no epoch has used. Damaged ones are sampled again."""
        found = read_lines(self.path)
        damaged = len(found.skipped)
        groups: dict[int, SampledGroup] = {}
        for row in found.rows:
            try:
                group = SampledGroup.model_validate(row)
            except pydantic.ValidationError:
                damaged += 1
                continue
            if not position.has_used(group.number):
                groups[group.number] = group
                self._lines[group.number] = json_text.dump(group)
        if damaged:
            logger.warning("`%s` has %s damaged lines, which are not used", self.path, damaged)
        return groups


def unfinished(position: Position, finished: Container[int], end: int) -> list[int]:
    """Return the groups before `end` that were started, or skipped, and did not finish."""
    numbers = sorted({*position.open, *range(position.next, end)})
    return [number for number in numbers if number not in finished]
