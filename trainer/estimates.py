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
CLEAR_FROM = 6
"""Examples with the same difference that make it clear: chance would give all of them one sign with
p = 2 / 2^6 = 0.031 (the sign test), and 5 of them with 0.063."""
_RELATIVE, _ABSOLUTE = 1e-9, 1e-12  # numbers that are closer differ by rounding only
_EXACT_T = (12.7062, 4.3027, 3.1824, 2.7764)  # 97.5 % quantiles at 1 to 4 degrees of freedom


def mean_interval(values: Sequence[float]) -> Interval | None:
    """The 95 % confidence interval of the mean, by Student's t.

    None for fewer than two values, or where all are equal and say nothing about the spread.
    Values that differ by rounding only are equal: they would give an interval without a width.
    """
    if len(values) < 2 or all(_is_close(value, values[0]) for value in values):
        return None
    mean = statistics.fmean(values)
    width = _t(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return mean - width, mean + width


def is_clear(examples: int, difference: float | None, interval: Interval | None) -> bool:
    """Whether a mean difference is clear: its interval excludes 0.

    Without an interval all examples differ by the same amount, which is clear from `CLEAR_FROM` on.
    """
    if interval is not None:
        return interval[0] > 0 or interval[1] < 0
    return difference is not None and abs(difference) > _ABSOLUTE and examples >= CLEAR_FROM


def _is_close(one: float, two: float) -> bool:
    return math.isclose(one, two, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)


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
        return is_clear(self.examples, self.difference, self.interval)


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
