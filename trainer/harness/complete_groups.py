"""`CompleteGroups`: the groups that are sampled and scored, and wait for a step."""

from collections.abc import Callable, Collection, Iterator, Sequence

from trainer.harness.off_policy_rules import Limits, divide
from trainer.harness.sampled_groups import SampledGroup, ages

FEWEST_RUNS = 2  # fewer cannot be compared with each other


class CompleteGroups:
    """Keeps the groups as they are for training from `step`: without runs that are too old."""

    def __init__(
        self,
        limits: Limits,
        teaches: Callable[[Sequence[float]], bool],
        groups: Collection[SampledGroup] = (),
    ) -> None:
        """`teaches` says whether a group with these rewards gives a signal."""
        self.step = 0
        """The step that the next one is trained from."""
        self._limits = limits
        self._teaches = teaches
        self._groups = {group.number: group for group in groups}
        self._written_off: set[int] = set()
        """Groups that lost their runs before this step: it samples as if without them."""

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[SampledGroup]:
        return iter(self._groups.values())

    @property
    def numbers(self) -> Collection[int]:
        return self._groups.keys()

    def begin(self, step: int) -> None:
        """Make the groups ready for training from `step`.

        Groups that lost their runs, in an outage or by their age, say nothing about the examples.
        They are reported with this step, but do not count among the groups sampled for it.
        """
        self.step = step
        for group in list(self):
            self.add(group)
        self._written_off = {one.number for one in self if len(one.trajectories) < FEWEST_RUNS}

    def add(self, group: SampledGroup) -> None:
        """Add a group without its stale runs. One that teaches nothing is not lost by its age."""
        if self._teaches(group.rewards):
            group = group.without_stale(self.step, self._limits.max_age)
        self._groups[group.number] = group

    def divided(self) -> tuple[list[SampledGroup], list[SampledGroup]]:
        """Return the groups that give a signal, and the idle ones."""
        counted = (group for group in self if group.number not in self._written_off)
        return divide(counted, self._teaches)

    def take(self) -> tuple[list[SampledGroup], dict[str, float]]:
        """Remove the groups for the next step. Return them, and the ages of what it trains on."""
        trained, idle = self._limits.take(*self.divided(), self.step)
        lost = [self._groups[number] for number in self._written_off]
        self._written_off = set()
        taken = sorted([*trained, *idle, *lost], key=lambda group: group.number)
        for group in taken:
            del self._groups[group.number]
        return taken, ages(trained, self.step)
