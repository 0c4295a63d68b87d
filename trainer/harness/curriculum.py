"""Curriculum learning as pure functions: choose an epoch's groups and compute the next state."""

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from trainer.harness.config import CurriculumConfig


@dataclass(frozen=True)
class CurriculumState:
    """Progress of the curriculum, saved as `curriculum_state.json`."""

    current_percentile: float
    last_expansion_epoch: int = 0
    total_groups: int = 0
    """Number of groups in the first epoch whose rewards differed enough to train on."""
    included_groups: tuple[int, ...] = ()
    """Indices of the groups that the last epoch trained on."""

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "included_groups": list(self.included_groups)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "CurriculumState":
        return TypeAdapter(cls).validate_python(value)


def start(config: CurriculumConfig) -> CurriculumState:
    """Return the state before the first epoch."""
    return CurriculumState(config.initial_percentile if config.enabled else 1.0)


def expand(config: CurriculumConfig, state: CurriculumState, epoch: int) -> CurriculumState:
    """Return the state at `epoch` (from 0), with a larger share once the interval has passed."""
    elapsed = epoch - state.last_expansion_epoch
    if not config.enabled or elapsed < config.expansion_interval or state.current_percentile >= 1:
        return state
    # Rounding keeps float error from leaving the share just below 1.
    percentile = min(1.0, round(state.current_percentile + config.increment_percentile, 9))
    return replace(state, current_percentile=percentile, last_expansion_epoch=epoch)


def differ(config: CurriculumConfig, rewards: Sequence[float]) -> bool:
    """Whether the rewards of a group differ enough for the curriculum."""
    return bool(rewards) and (
        not config.enabled or round(max(rewards) - min(rewards), 9) >= config.min_reward_diff
    )


def select(
    config: CurriculumConfig,
    state: CurriculumState,
    rewards: Sequence[Sequence[float]],
    rng: random.Random,
) -> tuple[list[int], CurriculumState]:
    """Return the indices of the groups to train on, easiest first, and the new state."""
    if not config.enabled:
        chosen = list(range(len(rewards)))
        return chosen, replace(state, included_groups=tuple(chosen), total_groups=len(rewards))
    means = {
        index: sum(group) / len(group)
        for index, group in enumerate(rewards)
        if differ(config, group)
    }
    order = sorted(means, key=lambda index: means[index], reverse=not config.sort_ascending)
    count = max(1, math.ceil(round(len(order) * state.current_percentile, 9)))
    chosen = order[:count]
    if config.random_subsample is not None:
        limit = math.ceil(round(len(order) * config.random_subsample, 9))
        if len(chosen) > limit:
            chosen = rng.sample(chosen, limit)
    total = state.total_groups or len(order)
    return chosen, replace(state, included_groups=tuple(sorted(chosen)), total_groups=total)
