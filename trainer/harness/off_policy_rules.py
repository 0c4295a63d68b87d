"""The rules of sampling ahead as pure functions: how far, when a step is due, and on what."""

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from trainer.harness.sampled_groups import SampledGroup

STRAGGLING = 2.0  # times the median of the runs that have ended
SHORTEST_LAG_S = 1.0  # after that median; another group would gain nothing from less


@dataclass(frozen=True)
class Limits:
    """How many groups a step trains on, and how old and how many they may be."""

    max_age: int
    """`max_steps_off_policy`."""
    groups: int
    """Groups with a signal that a step waits for."""
    oversample: float

    def sampled(self, steps: int) -> int:
        """Return how many groups may be sampled for `steps` steps."""
        return math.ceil(round(self.oversample * self.groups * steps, 9))

    def may_start(
        self, steps: int, *, waits: bool, live: int, idle: int, lagging: Collection[float] = ()
    ) -> bool:
        """Whether another group may start while `steps` steps can still use it.

        `live` groups are under way or wait with a signal; `idle` ones turned out to have none.
        `lagging` has the share of ended runs of each group that only waits for stragglers. While a
        step `waits` for its groups, others take their place, so that the engine does not run dry,
        but not while it trains: they would have to be complete when the next one begins.
        """
        room = 0
        if waits:
            # No later step can use what the last one waits for, so each of them is replaced.
            room = len(lagging) if steps == 1 else math.floor(round(sum(lagging), 9))
        return live - room < self.groups * steps and live + idle < self.sampled(steps)

    def enough(self, *, ready: int, idle: int) -> bool:
        """Whether a step can begin: its groups are there, or no more may be sampled for it."""
        return ready >= self.groups or ready + idle >= self.sampled(1)

    def is_due(self, sampled_by: int, step: int) -> bool:
        """Whether what `sampled_by` sampled is too old for the step after the next."""
        return step - sampled_by >= self.max_age

    def take(
        self, ready: Iterable[SampledGroup], idle: Sequence[SampledGroup], step: int
    ) -> tuple[list[SampledGroup], list[SampledGroup]]:
        """Return the groups for the next step, and the idle ones that were sampled for it.

        The oldest groups come first, and all that would go stale are trained. Idle groups beyond
        the limit count for the step after.
        """
        ranked = sorted(ready, key=lambda group: (group.oldest, group.number))
        trained = [
            group
            for index, group in enumerate(ranked)
            if index < self.groups or self.is_due(group.oldest, step)
        ]
        room = max(0, self.sampled(1) - len(trained))
        return trained, sorted(idle, key=lambda group: group.number)[:room]


def straggling_from(generations: int, ended: Sequence[float]) -> float | None:
    """Return the age in seconds from which a group's last runs are stragglers.

    `ended` has the age at which each of the others ended. None while fewer than half have.
    """
    if 2 * len(ended) < generations:
        return None
    median = statistics.median(ended)
    return max(STRAGGLING * median, median + SHORTEST_LAG_S)


def divide(
    groups: Iterable[SampledGroup], teaches: Callable[[Sequence[float]], bool]
) -> tuple[list[SampledGroup], list[SampledGroup]]:
    """Return the groups whose rewards give a signal, and the idle ones."""
    groups = list(groups)
    taught = [teaches(group.rewards) for group in groups]
    pairs = list(zip(groups, taught, strict=True))
    return [group for group, yes in pairs if yes], [group for group, yes in pairs if not yes]
