"""What the runs of several models on the same examples say: means, pass@k, paired differences.

Validation, `trainer eval` and the page share this code, so that they show the same numbers.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from kit.errors import ConfigError
from kit.types import Json
from trainer.estimates import Interval, mean_interval, paired, pass_at_k


@dataclass(frozen=True)
class Measurement:
    """What the runs of one model on one dataset say."""

    rewards: list[float]
    """The reward of each run that has one."""
    by_example: dict[str, list[float]]
    lost: dict[str, int]
    """Number of runs without a reward, by reason. They count neither as 0 nor as 1."""
    metrics: dict[str, float]

    @property
    def examples(self) -> dict[str, float]:
        """The mean reward of each example."""
        return {name: statistics.fmean(rewards) for name, rewards in self.by_example.items()}

    @property
    def mean(self) -> float | None:
        """The mean over examples of the mean over their runs; None without a reward."""
        return statistics.fmean(self.examples.values()) if self.by_example else None

    @property
    def interval(self) -> Interval | None:
        return mean_interval(list(self.examples.values()))

    def pass_at(self, k: int, success: float | None) -> Json:
        """pass@k over the examples that have `k` runs. A reward of at least `success` passes.

        Without `success`, the rewards must be 0 or 1.
        """
        if success is None:
            self._check_binary()
            success = 1.0
        estimates = [
            pass_at_k(sum(reward >= success for reward in rewards), len(rewards), k)
            for rewards in self.by_example.values()
            if len(rewards) >= k
        ]
        return {
            "k": k,
            "mean": statistics.fmean(estimates) if estimates else None,
            "interval": mean_interval(estimates),
            "examples": len(estimates),
        }

    def _check_binary(self) -> None:
        for example, rewards in self.by_example.items():
            for reward in rewards:
                if reward not in (0, 1):
                    raise ConfigError(
                        f"pass@k needs rewards of 0 or 1, and example `{example}` has `{reward:g}`",
                        hint="Say from which reward on a run passes, such as `--success 0.5`; "
                        "the runs are kept",
                    )


def measure(rows: Iterable[Json]) -> Measurement:
    """Measure rows as `trainer.harness.runner.record` writes them."""
    by_example: dict[str, list[float]] = {}
    lost: dict[str, int] = {}
    rows = list(rows)
    for row in rows:
        if row["failure"] is not None:
            lost[str(row["failure"])] = lost.get(str(row["failure"]), 0) + 1
        elif row["reward"] is not None:
            by_example.setdefault(str(row["id"]), []).append(float(row["reward"]))
    return Measurement(
        rewards=[reward for rewards in by_example.values() for reward in rewards],
        by_example=by_example,
        lost=lost,
        metrics=mean_metrics(row["metrics"] for row in rows if row["failure"] is None),
    )


def mean_metrics(metrics: Iterable[Mapping[str, float | None]]) -> dict[str, float]:
    """The mean of each metric over the runs that have it."""
    values: dict[str, list[float]] = {}
    for of_run in metrics:
        for name, value in of_run.items():
            if value is not None:  # a file has null where a metric was not finite
                values.setdefault(name, []).append(value)
    return {name: statistics.fmean(numbers) for name, numbers in sorted(values.items())}


def compared(
    measured: Mapping[str, Measurement], ks: Sequence[int], success: float | None
) -> list[Json]:
    """A row for each model, with its difference to the first one by example."""
    label, first = next(iter(measured.items()))
    rows = []
    for model, one in measured.items():
        difference = paired(first.examples, one.examples)
        rows.append(
            {
                "model": model,
                "mean": one.mean,
                "interval": one.interval,
                "examples": len(one.by_example),
                "runs": len(one.rewards),
                "lost": one.lost,
                "pass_at": [one.pass_at(k, success) for k in ks],
                "metrics": one.metrics,
                "paired": None
                if one is first
                else {"against": label, **asdict(difference), "clear": difference.clear},
            }
        )
    return rows
