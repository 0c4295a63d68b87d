"""Rewards of trajectories: which ones are valid, and when those of a group are equal."""

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.errors import BadRequest

LIMIT = 1e15
"""Larger rewards are refused, because sums and squares of them could overflow."""
RELATIVE, ABSOLUTE = 1e-9, 1e-12
"""Rewards of a group are equal if they differ by less than this share of the largest, or by less
than this amount. `0.1 + 0.2` and `0.3` differ by rounding only, and teach nothing."""


def reward_of(trajectory: Mapping[str, Any], group: int, number: int) -> float:
    """The reward of a trajectory; 0 if it has none, because ART leaves out what is 0.

    Raises BadRequest, which names the trajectory by its place, for one that cannot be right.
    """
    reward = trajectory.get("reward", 0.0)
    # An integer may be too large for a double, so its size is compared first.
    if not isinstance(reward, int | float) or not abs(reward) <= LIMIT:
        raise BadRequest(
            f"Trajectory `{number}` of group `{group}` has the reward `{_shown(reward)}`",
            hint=f"Fix the reward function: a reward is a number from {-LIMIT:g} to {LIMIT:g}",
        )
    return float(reward)


def normalise(groups: Sequence[Mapping[str, Any]]) -> None:
    """Write every trajectory's reward as a finite number, so that all later readers agree."""
    for index, group in enumerate(groups):
        for number, trajectory in enumerate(group.get("trajectories") or []):
            trajectory["reward"] = reward_of(trajectory, index, number)


def are_equal(rewards: Sequence[float]) -> bool:
    """Whether rewards differ by rounding only, so that there is nothing to learn from them."""
    if not rewards:
        return True
    largest = max(map(abs, rewards))
    return max(rewards) - min(rewards) <= max(RELATIVE * largest, ABSOLUTE)


def _shown(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    return str(value)[:40]
