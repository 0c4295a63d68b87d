"""What the loop decides, as pure functions: the numbers of an epoch, when to stop, and why."""

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from kit.errors import ConfigError
from kit.types import Json
from trainer.errors import BackendBehind
from trainer.harness.config import EarlyStopping
from trainer.harness.metrics import reward_summary
from trainer.harness.types import Trajectory, TrajectoryCollection


def teaching(groups: Sequence[list[Trajectory]]) -> list[list[Trajectory]]:
    """The groups that can teach something: their rewards differ."""
    return [group for group in groups if any(t.reward != group[0].reward for t in group)]


def epoch_row(
    epoch: int, found: TrajectoryCollection, chosen: TrajectoryCollection, percentile: float
) -> Json:
    """The metrics of an epoch, before and after the choice of groups."""
    return {
        "epoch": epoch,
        "timestamp": datetime.now(UTC).isoformat(),
        "run_id": found.run_id,
        **reward_summary([reward for group in found.rewards for reward in group]),
        "num_trajectories": found.count,
        "num_groups": len(found.trajectories),
        "filtered_trajectories": chosen.count,
        "filtered_groups": len(chosen.trajectories),
        **reward_summary([reward for group in chosen.rewards for reward in group], "filtered_"),
        "curriculum_percentile": percentile,
    }


def check_rule(rule: EarlyStopping | None, *, validated: bool) -> None:
    if rule and rule.metric.startswith("validation/") and not validated:
        raise ConfigError(
            f"`early_stopping` watches `{rule.metric}`, and there is no validation dataset",
            hint="Give `--validation_dataset`, or set `early_stopping.metric: avg_reward`",
        )


def reason_to_stop(
    rule: EarlyStopping | None, training: Sequence[Json], validation: Sequence[Json]
) -> str | None:
    """Why the run should end before its last epoch, or None."""
    if rule is None:
        return None
    rows = validation if rule.metric.startswith("validation/") else training
    values = [row["avg_reward"] for row in rows if row.get("avg_reward") is not None]
    if not values:
        return None
    if rule.target is not None and values[-1] >= rule.target:
        return f"`{rule.metric}` reached {values[-1]:.4f}"
    before, since = values[: -rule.patience], values[-rule.patience :]
    gain = max(since) - max(before, default=-math.inf)
    if before and (gain <= 0 or gain < rule.min_delta):
        return f"`{rule.metric}` did not rise in {rule.patience} measurements"
    return None


def check_reached(step: int | None, reached: int | None) -> None:
    """Raise where the backend's step is before the one that a run had reached."""
    if step is not None and reached is not None and step < reached:
        raise BackendBehind(f"The backend is at step {step}, but this run had reached {reached}")


def reasons_for_nothing(row: Mapping[str, Any]) -> str:
    """Why an epoch had nothing to train on, from its counts."""
    told = [f"{count} runs: {reason}" for reason, count in row["failures"].items()]
    dropped = {name.split("dropped_")[1]: n for name, n in row.items() if "dropped_" in name}
    told += [f"{count:g} groups or trajectories: {why}" for why, count in dropped.items()]
    if row["num_groups"] and not row["filtered_groups"]:
        told.append(f"{row['num_groups']} groups: equal_rewards")
    return "; ".join(told) or "no example gave a trajectory"
