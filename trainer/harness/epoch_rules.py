"""The rules of the epoch loop as pure functions: metrics, early stopping and its reasons."""

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from kit.errors import ConfigError
from kit.types import Json
from trainer.errors import BackendBehind, NothingToTrainOn
from trainer.harness.config import EarlyStoppingConfig
from trainer.harness.metrics import reward_summary
from trainer.harness.types import Trajectory, TrajectoryCollection

MUCH = 0.1  # of the time of a run


def groups_with_signal(groups: Sequence[list[Trajectory]]) -> list[list[Trajectory]]:
    """Return the groups whose rewards differ. Equal rewards give no training signal."""
    return [group for group in groups if any(t.reward != group[0].reward for t in group)]


def epoch_metrics(
    epoch: int, sampled: TrajectoryCollection, chosen: TrajectoryCollection, percentile: float
) -> Json:
    """Return the metrics of an epoch, for all sampled groups and for those to train on."""
    kept = groups_with_signal(chosen.trajectories)
    return {
        "epoch": epoch,
        "timestamp": datetime.now(UTC).isoformat(),
        "run_id": sampled.run_id,
        **reward_summary([reward for group in sampled.rewards for reward in group]),
        "num_trajectories": sampled.count,
        "num_groups": len(sampled.trajectories),
        "filtered_trajectories": sum(map(len, kept)),
        "filtered_groups": len(kept),
        **reward_summary([one.reward for group in kept for one in group], "filtered_"),
        "curriculum_percentile": percentile,
    }


def reward_row(row: Mapping[str, Any]) -> Json:
    """Return the part of an epoch's metrics that `reward_history.json` keeps."""
    names = ("epoch", "timestamp", "avg_reward", "min_reward", "max_reward", "reward_std_dev")
    return {name: row.get(name) for name in (*names, "num_trajectories", "curriculum_percentile")}


def check_early_stopping(rule: EarlyStoppingConfig | None, *, validated: bool) -> None:
    """Raise if the rule watches validation and there is none."""
    if rule and rule.metric.startswith("validation/") and not validated:
        raise ConfigError(
            f"`early_stopping` watches `{rule.metric}`, but there is no validation dataset",
            hint="Pass `--validation_dataset`, or set `early_stopping.metric: avg_reward`",
        )


def reason_to_stop(
    rule: EarlyStoppingConfig | None, training: Sequence[Json], validation: Sequence[Json]
) -> str | None:
    """Return why the run should stop before its last epoch, or None."""
    if rule is None:
        return None
    rows = validation if rule.metric.startswith("validation/") else training
    values = [row["avg_reward"] for row in rows if row.get("avg_reward") is not None]
    if not values:
        return None
    if rule.target is not None and values[-1] >= rule.target:
        return f"`{rule.metric}` reached {values[-1]:.4f}"
    earlier, recent = values[: -rule.patience], values[-rule.patience :]
    gain = max(recent) - max(earlier, default=-math.inf)
    if earlier and (gain <= 0 or gain < rule.min_delta):
        return f"`{rule.metric}` did not rise in {rule.patience} measurements"
    return None


def check_backend_step(step: int | None, reached: int | None) -> None:
    """Raise if the backend's step is lower than the one the run had reached."""
    if step is not None and reached is not None and step < reached:
        raise BackendBehind(f"The backend is at step {step}, but this run had reached {reached}")


def check_for_runs(epochs: Sequence[Mapping[str, Any]]) -> None:
    """Raise if every run of every epoch was lost: then the run as a whole did nothing."""
    lost = sum(sum(row.get("failures", {}).values()) for row in epochs)
    if lost and not any(row["num_trajectories"] for row in epochs):
        cause = next(row["commonest_failure"] for row in reversed(epochs) if row["failures"])
        raise NothingToTrainOn(
            f"All {lost} runs were lost, most often with: {cause}",
            hint="Fix the workflow or the evaluator; `eval.general.output_dir` has every run",
        )


def reasons_for_no_training(row: Mapping[str, Any]) -> str:
    """Explain from an epoch's counts why it had nothing to train on."""
    reasons = [f"{count} runs: {reason}" for reason, count in row["failures"].items()]
    dropped = {name.split("dropped_")[1]: n for name, n in row.items() if "dropped_" in name}
    reasons += [f"{count:g} groups or trajectories: {why}" for why, count in dropped.items()]
    if row["num_groups"] and not row["filtered_groups"]:
        reasons.append(f"{row['num_groups']} groups: equal_rewards")
    return "; ".join(reasons) or "no example produced a trajectory"


def advice_on_turns(epochs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say how long a run sampled and trained in turns, if doing both at once would save much."""
    whole, sampling, training = (
        sum(row.get(f"time/{part}_s", 0.0) for row in epochs)
        for part in ("epoch", "sample", "train")
    )
    if min(sampling, training) <= MUCH * whole:
        return []
    return [
        f"Sampling took {sampling / whole:.0%} of the time and training {training / whole:.0%}, in "
        "turns; with `finetuning.max_steps_off_policy: 1` they overlap"
    ]


def tell_the_plan(chosen: TrajectoryCollection, steps: int) -> None:
    """Say with each trajectory how many steps there will be, for the page of the run."""
    for group in chosen.trajectories:
        for trajectory in group:
            trajectory.metadata = {**(trajectory.metadata or {}), "steps_planned": steps}
