"""Curriculum learning as pure functions: which groups an epoch trains on, and the next state."""

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from trainer.harness.config import CurriculumConfig


@dataclass(frozen=True)
class CurriculumState:
    """Where the curriculum stands; saved as `curriculum_state.json`."""

    current_percentile: float
    last_expansion_epoch: int = 0
    total_groups: int = 0
    """Groups with a signal in the first epoch."""
    included_groups: tuple[int, ...] = ()
    """Groups that the last epoch trained on, by their place in it."""

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "included_groups": list(self.included_groups)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "CurriculumState":
        return cls(**{**value, "included_groups": tuple(value["included_groups"])})


def start(config: CurriculumConfig) -> CurriculumState:
    return CurriculumState(config.initial_percentile if config.enabled else 1.0)


def expand(config: CurriculumConfig, state: CurriculumState, epoch: int) -> CurriculumState:
    """The state at `epoch` (from 0): larger once the interval has passed."""
    waited = epoch - state.last_expansion_epoch
    if not config.enabled or waited < config.expansion_interval or state.current_percentile >= 1:
        return state
    # Rounded, so that 0.3 + 0.2 is 0.5 and a last hair does not keep it below 1.
    grown = min(1.0, round(state.current_percentile + config.increment_percentile, 9))
    return replace(state, current_percentile=grown, last_expansion_epoch=epoch)


def select(
    config: CurriculumConfig,
    state: CurriculumState,
    rewards: Sequence[Sequence[float]],
    chance: random.Random,
) -> tuple[list[int], CurriculumState]:
    """Places of the groups to train on, easiest first, and the state that records them."""
    if not config.enabled:
        chosen = list(range(len(rewards)))
        return chosen, replace(state, included_groups=tuple(chosen), total_groups=len(rewards))
    means = {
        place: sum(group) / len(group)
        for place, group in enumerate(rewards)
        if group and round(max(group) - min(group), 9) >= config.min_reward_diff
    }
    order = sorted(means, key=lambda place: means[place], reverse=not config.sort_ascending)
    count = max(1, math.ceil(round(len(order) * state.current_percentile, 9)))
    chosen = order[:count]
    if config.random_subsample is not None:
        most = math.ceil(round(len(order) * config.random_subsample, 9))
        if len(chosen) > most:
            chosen = chance.sample(chosen, most)
    total = state.total_groups or len(order)
    return chosen, replace(state, included_groups=tuple(sorted(chosen)), total_groups=total)
