import random

import pytest

from trainer.harness import curriculum
from trainer.harness.config import CurriculumConfig
from trainer.harness.curriculum import CurriculumState

ON = CurriculumConfig(enabled=True)
# Means 0.9, 0.5, 0.1, 0.7. The rewards of the third group are equal, so it has no signal.
REWARDS = [[0.8, 1.0], [0.2, 0.8], [0.1, 0.1], [0.5, 0.9]]


def chosen(config: CurriculumConfig, state: CurriculumState) -> list[int]:
    return curriculum.select(config, state, REWARDS, random.Random(0))[0]


def test_without_a_curriculum_every_group_is_kept_in_order() -> None:
    off = CurriculumConfig()
    assert chosen(off, curriculum.start(off)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("percentile", "expected"), [(0.3, [0]), (0.5, [0, 3]), (0.67, [0, 3, 1]), (1.0, [0, 3, 1])]
)
def test_the_easiest_groups_are_taken_and_flat_ones_never(
    percentile: float, expected: list[int]
) -> None:
    assert chosen(ON, CurriculumState(percentile)) == expected


def test_ascending_takes_the_hardest_first() -> None:
    hardest = CurriculumConfig(enabled=True, sort_ascending=True)
    assert chosen(hardest, CurriculumState(0.3)) == [1]


def test_min_reward_diff_decides_which_groups_are_flat() -> None:
    strict = CurriculumConfig(enabled=True, min_reward_diff=0.5)
    assert chosen(strict, CurriculumState(1.0)) == [1]


def test_the_share_grows_every_interval_until_it_includes_all_groups() -> None:
    state = curriculum.start(ON)
    seen = []
    for epoch in range(26):
        state = curriculum.expand(ON, state, epoch)
        seen.append(state.current_percentile)
    assert seen == [0.3] * 5 + [0.5] * 5 + [0.7] * 5 + [0.9] * 5 + [1.0] * 6


def test_a_random_subsample_keeps_its_share_and_depends_only_on_the_seed() -> None:
    config = CurriculumConfig(enabled=True, random_subsample=0.5)
    first, second = chosen(config, CurriculumState(1.0)), chosen(config, CurriculumState(1.0))
    assert first == second and len(first) == 2 and set(first) <= {0, 1, 3}


def test_nothing_is_chosen_when_no_group_has_a_signal() -> None:
    indices, _ = curriculum.select(ON, curriculum.start(ON), [[1.0, 1.0]], random.Random(0))
    assert indices == []


def test_the_state_survives_json() -> None:
    _, state = curriculum.select(ON, CurriculumState(0.5, 5), REWARDS, random.Random(0))
    assert state.included_groups == (0, 3) and state.total_groups == 3
    assert CurriculumState.from_json(state.as_json()) == state
