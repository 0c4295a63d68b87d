import itertools
import math
import random
import statistics

import pytest

from trainer.estimates import is_clear, mean_interval, paired, pass_at_k


@pytest.mark.parametrize(
    ("runs", "successes", "k"), [(5, c, k) for c in (0, 1, 3, 5) for k in (1, 2, 5)]
)
def test_pass_at_k_is_the_share_of_subsets_with_a_success(
    runs: int, successes: int, k: int
) -> None:
    outcomes = [1] * successes + [0] * (runs - successes)
    subsets = list(itertools.combinations(outcomes, k))
    share = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(successes, runs, k) == pytest.approx(share)


def test_pass_at_k_has_no_bias() -> None:
    # Over all outcomes of 4 runs that each succeed with chance p, the mean is 1 - (1 - p)^2.
    p = 0.3
    expected = sum(
        math.comb(4, c) * p**c * (1 - p) ** (4 - c) * pass_at_k(c, 4, 2) for c in range(5)
    )
    assert expected == pytest.approx(1 - (1 - p) ** 2)


def test_pass_at_more_than_there_are_runs_is_refused() -> None:
    with pytest.raises(ValueError, match="pass@3 needs at least 3 runs"):
        pass_at_k(1, 2, 3)


@pytest.mark.parametrize(("count", "quantile"), [(2, 12.706), (4, 3.182), (6, 2.571), (30, 2.045)])
def test_the_interval_is_students(count: int, quantile: float) -> None:
    values = [float(number) for number in range(count)]
    low, high = mean_interval(values) or (0, 0)
    width = quantile * statistics.stdev(values) / math.sqrt(count)
    assert (low + high) / 2 == pytest.approx(statistics.fmean(values))
    assert (high - low) / 2 == pytest.approx(width, rel=2e-3)


def test_the_interval_holds_the_true_mean_95_times_in_100() -> None:
    rng = random.Random(7)
    held = 0
    for _ in range(2000):
        low, high = mean_interval([rng.gauss(1, 2) for _ in range(8)]) or (0, 0)
        held += low <= 1 <= high
    assert 0.93 < held / 2000 < 0.97


@pytest.mark.parametrize("values", [[], [0.5], [1.0, 1.0, 1.0], [0.4 - 0.1, 0.5 - 0.2]])
def test_there_is_no_interval_without_a_spread(values: list[float]) -> None:
    assert mean_interval(values) is None


def test_pairs_are_clear_where_unpaired_means_are_not() -> None:
    first = {"a": 0.0, "b": 0.5, "c": 1.0, "d": 0.2, "only": 9.0}
    second = {"a": 0.11, "b": 0.59, "c": 1.1, "d": 0.32, "other": 9.0}
    found = paired(first, second)
    assert (found.examples, found.better, found.worse) == (4, 4, 0)
    assert found.difference == pytest.approx(0.105) and found.clear
    one, two = mean_interval(list(first.values())[:4]), mean_interval(list(second.values())[:4])
    assert one and two and one[1] > two[0]  # the intervals of the means overlap
    assert paired({"a": 1.0}, {"b": 1.0}).difference is None


@pytest.mark.parametrize("change", [1.0, -1.0])
def test_the_same_difference_on_all_examples_is_clear_from_6_on(change: float) -> None:
    for examples in range(1, 51):
        first = {str(number): 0.0 for number in range(examples)}
        found = paired(first, dict.fromkeys(first, change))
        assert found.interval is None and found.difference == change
        assert found.clear == (examples >= 6), examples


def test_no_difference_is_never_clear() -> None:
    means = {str(number): number / 50 for number in range(50)}
    assert not paired(means, means).clear
    assert not paired({}, {}).clear
    assert not is_clear(50, 1e-17, None)  # a mean that should be 0, and is rounded
