"""Rewards: rounding teaches nothing, and what is no reward is refused where a request enters."""

import math
from typing import Any

import pytest

from trainer.errors import BadRequest
from trainer.learner.prepare import group_advantages
from trainer.rewards import LIMIT, normalise, reward_of
from trainer.server import history
from trainer.server.wire import LogRequest, TrainRequest

MODEL = {"name": "m", "project": "p"}


def groups(*trajectories: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"trajectories": [{"messages_and_choices": []}, *trajectories]}]


@pytest.mark.parametrize(
    "rewards",
    [[0.1 + 0.2, 0.3], [0.1 + 0.2 - 0.3, 0.0], [-1e9, -1e9 - 1e-4], [LIMIT, LIMIT], [2.0], []],
)
@pytest.mark.parametrize("scale", [True, False])
def test_rewards_that_differ_by_rounding_teach_nothing(rewards: list[float], scale: bool) -> None:
    assert group_advantages(rewards, scale=scale) is None


@pytest.mark.parametrize("rewards", [[1e-9, 2e-9], [1.0, 1.0 + 1e-6], [LIMIT, -LIMIT], [0.0, 1.0]])
def test_rewards_that_differ_are_centred(rewards: list[float]) -> None:
    advantages = group_advantages(rewards, scale=True)
    assert advantages and advantages[0] and all(map(math.isfinite, advantages))
    assert sum(advantages) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("reward", "shown"),
    [
        (1.7e308, "1.7e+308"),
        (10**400, "an integer of 1329 bits"),
        (-(10**4000), "an integer of 13288 bits"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (None, "None"),
        ("high", "high"),
    ],
)
def test_a_reward_that_cannot_be_right_is_refused_by_its_place(reward: Any, shown: str) -> None:
    given = groups({"reward": reward})
    for kind in (TrainRequest, LogRequest):
        body = {"model": MODEL, "trajectory_groups": given, "digest": ""}
        with pytest.raises(BadRequest, match="Trajectory `1` of group `0`") as caught:
            kind.model_validate(body)
        assert f"has the reward `{shown}`" in caught.value.message


def test_an_omitted_reward_is_zero_for_everyone() -> None:
    """The newest ART leaves out what has its default value."""
    request = TrainRequest.model_validate(
        {"model": MODEL, "trajectory_groups": groups({"reward": True}), "digest": ""}
    )
    members = request.trajectory_groups[0]["trajectories"]
    assert [member["reward"] for member in members] == [0.0, 1.0]
    assert history.averages(groups({"reward": 1}))["reward"] == 0.5
    assert reward_of({}, 0, 0) == 0.0


def test_averages_of_huge_numbers_do_not_overflow() -> None:
    given = groups(*({"metrics": {"x": value}} for value in (1.7e308, 1.7e308)))
    assert history.averages(given)["x"] == pytest.approx(1.7e308)
    infinite = groups(*({"metrics": {"x": value}} for value in (math.inf, -math.inf)))
    assert "x" not in history.averages(infinite)
    with pytest.raises(BadRequest, match="`x` is `an integer of 1329 bits`"):
        history.averages(groups({"metrics": {"x": 10**400}}))
    large = groups({"reward": LIMIT}, {"reward": -LIMIT})
    normalise(large)
    assert history.averages(large)["reward_std_dev"] > 0
