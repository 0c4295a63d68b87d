"""Estimates from a few examples: confidence intervals, pass@k, paired differences.

An example counts once, however often it was attempted: attempts at one example resemble each other,
and counting each of them would make every interval too narrow.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

METHOD = "95 % interval of the mean over examples (Student's t)"
Interval = tuple[float, float]
_EXACT_T = (12.7062, 4.3027, 3.1824, 2.7764)  # 97.5 % quantiles at 1 to 4 degrees of freedom


def mean_interval(values: Sequence[float]) -> Interval | None:
    """The 95 % confidence interval of the mean, by Student's t.

    None for fewer than two values, or where all are equal and say nothing about the spread.
    """
    if len(values) < 2 or all(value == values[0] for value in values):
        return None
    mean = statistics.fmean(values)
    width = _t(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return mean - width, mean + width


def _t(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, from 5 degrees on by Cornish and Fisher's expansion."""
    if freedom <= len(_EXACT_T):
        return _EXACT_T[freedom - 1]
    z, n = 1.959964, freedom
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )


def pass_at_k(successes: int, runs: int, k: int) -> float:
    """The chance that one of `k` runs succeeds, estimated without bias from more runs.

    It is the share of the subsets of `k` runs that hold a success (Chen et al., 2021,
    arXiv:2107.03374). `1 - (1 - successes / runs) ** k` would be too low.
    """
    if not 1 <= k <= runs:
        raise ValueError(f"pass@{k} needs at least {k} runs, and there are {runs}")
    return 1 - math.comb(runs - successes, k) / math.comb(runs, k)


@dataclass(frozen=True)
class Paired:
    """How a second model differs from a first on the examples that both have."""

    examples: int
    difference: float | None
    """Mean of second minus first."""
    interval: Interval | None
    better: int
    worse: int

    @property
    def clear(self) -> bool:
        """Whether the interval excludes zero."""
        return self.interval is not None and (self.interval[0] > 0 or self.interval[1] < 0)


def paired(first: Mapping[str, float], second: Mapping[str, float]) -> Paired:
    """Compare means by example, which removes how much examples differ in difficulty."""
    both = sorted(first.keys() & second.keys())
    differences = [second[name] - first[name] for name in both]
    return Paired(
        examples=len(both),
        difference=statistics.fmean(differences) if differences else None,
        interval=mean_interval(differences),
        better=sum(difference > 0 for difference in differences),
        worse=sum(difference < 0 for difference in differences),
    )
