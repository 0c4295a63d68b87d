import random

import pytest

from trainer.harness import curriculum
from trainer.harness.config import CurriculumConfig
from trainer.harness.curriculum import CurriculumState

ON = CurriculumConfig(enabled=True)
# Means 0.9, 0.5, 0.1, 0.7; the third differs by too little to teach anything.
REWARDS = [[0.8, 1.0], [0.2, 0.8], [0.1, 0.1], [0.5, 0.9]]


def places(config: CurriculumConfig, state: CurriculumState) -> list[int]:
    return curriculum.select(config, state, REWARDS, random.Random(0))[0]


def test_without_a_curriculum_every_group_is_kept_in_its_order() -> None:
    off = CurriculumConfig()
    assert places(off, curriculum.start(off)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("percentile", "expected"), [(0.3, [0]), (0.5, [0, 3]), (0.67, [0, 3, 1]), (1.0, [0, 3, 1])]
)
def test_the_easiest_share_is_taken_and_flat_groups_never(
    percentile: float, expected: list[int]
) -> None:
    assert places(ON, CurriculumState(percentile)) == expected


def test_ascending_takes_the_hardest_first() -> None:
    hardest = CurriculumConfig(enabled=True, sort_ascending=True)
    assert places(hardest, CurriculumState(0.3)) == [1]


def test_the_least_difference_decides_what_counts_as_flat() -> None:
    strict = CurriculumConfig(enabled=True, min_reward_diff=0.5)
    assert places(strict, CurriculumState(1.0)) == [1]


def test_the_share_grows_by_its_increment_every_interval_until_all_are_in() -> None:
    state = curriculum.start(ON)
    seen = []
    for epoch in range(26):
        state = curriculum.expand(ON, state, epoch)
        seen.append(state.current_percentile)
    assert seen == [0.3] * 5 + [0.5] * 5 + [0.7] * 5 + [0.9] * 5 + [1.0] * 6


def test_a_random_subsample_keeps_at_most_its_share_and_is_the_same_for_the_same_seed() -> None:
    config = CurriculumConfig(enabled=True, random_subsample=0.5)
    first, second = places(config, CurriculumState(1.0)), places(config, CurriculumState(1.0))
    assert first == second and len(first) == 2 and set(first) <= {0, 1, 3}


def test_groups_without_any_signal_leave_nothing() -> None:
    chosen, _ = curriculum.select(ON, curriculum.start(ON), [[1.0, 1.0]], random.Random(0))
    assert chosen == []


def test_the_state_survives_json() -> None:
    _, state = curriculum.select(ON, CurriculumState(0.5, 5), REWARDS, random.Random(0))
    assert state.included_groups == (0, 3) and state.total_groups == 3
    assert CurriculumState.from_json(state.as_json()) == state
