"""What a train call makes of its groups: what is trained, dropped and rejected."""

import math
import random
from pathlib import Path
from typing import Any

import pytest

from tests.unit.tiny_learner import (
    files,
    groups,
    learner,
    train,
    trajectory,
)
from trainer import checkpoint
from trainer.errors import BadRequest
from trainer.exact_tokens import ExactTokens, mark_ambiguous


def test_groups_that_teach_nothing_advance_the_step_with_unchanged_weights(tmp_path: Path) -> None:
    draw = random.Random(0)
    same = {"trajectories": [trajectory(draw, 0.1) for _ in range(3)]}
    row, last = train(learner(), tmp_path, [same])
    assert row["data/step_num_groups_trainable"] == row["num_gradient_steps"] == 0
    assert row["data/dropped_equal_rewards"] == 1
    assert last["step"] == 1
    assert last["dropped"] == [{"reason": "equal_rewards", "group": 0, "size": 3}]
    assert files(tmp_path, 0) == files(tmp_path, 1)


def test_a_trajectory_that_cannot_be_trained_on_is_dropped_with_its_reason(tmp_path: Path) -> None:
    (group,) = groups(0, 1)
    none, no_logprobs, long = group["trajectories"]
    none["messages_and_choices"].pop()
    no_logprobs["messages_and_choices"][1]["logprobs"] = None
    long["messages_and_choices"][0]["content"] = "?" * 200
    row, last = train(learner(), tmp_path, [group])
    assert [drop["reason"] for drop in last["dropped"]] == [
        "no_trainable_tokens", "no_logprobs", "too_long",
    ]  # fmt: skip
    assert [drop["trajectory"] for drop in last["dropped"]] == [0, 1, 2]
    names = ("exact_prompts", "rendered_prompts", "choices_without_logprobs")
    assert [row[f"data/{name}"] for name in names] == [0, 0, 1]
    assert row["data/step_num_groups_trainable"] == 0
    allowed = train(learner(), tmp_path, [group], allow_training_without_logprobs=True)
    assert allowed[0]["data/step_num_groups_trainable"] == 1


def test_a_choice_that_is_left_out_of_a_trained_trajectory_is_counted(tmp_path: Path) -> None:
    given = groups(0)
    items = given[0]["trajectories"][0]["messages_and_choices"]
    items += [items[0], {**items[1], "logprobs": None}]
    row, last = train(learner(), tmp_path, given)
    assert row["data/choices_without_logprobs"] == 1 and not last["dropped"]


def test_a_step_says_how_many_prompts_were_exact_and_how_many_choices_constrained(
    tmp_path: Path,
) -> None:
    given = groups(0)
    items = [group["trajectories"][0]["messages_and_choices"][1] for group in given]
    for item, constrained in zip(items, (True, False), strict=True):
        ids = [int(token["token"][9:]) for token in item["logprobs"]["content"]]
        ExactTokens([1, 2], ids, [-5.5] * len(ids), constrained).put(item)
    mark_ambiguous(given[0]["trajectories"][1]["messages_and_choices"][1])
    row, last = train(learner(), tmp_path, given)
    assert last["dropped"] == [{"reason": "ambiguous", "group": 0, "trajectory": 1}]
    names = ("exact_prompts", "rendered_prompts", "ambiguous_choices", "constrained_share")
    assert [row[f"data/{name}"] for name in names] == [2, 3, 1, 0.2]
    assert row["data/retokenized"] == 0


def test_a_trajectory_without_an_advantage_is_not_counted_as_trained(tmp_path: Path) -> None:
    [group] = groups(0, 1)
    for one, reward in zip(group["trajectories"], (0.0, 0.5, 1.0), strict=True):
        one["reward"] = reward
    middle = group["trajectories"][1]["messages_and_choices"]
    middle += [middle[0], {**middle[1], "logprobs": None}]
    row, last = train(learner(), tmp_path, [group])
    assert row["data/rendered_prompts"] == 2 and not last["dropped"]
    assert row["data/choices_without_logprobs"] == 1
    row, _ = train(learner(), tmp_path, [group], kl_penalty_coef=0.1)
    assert row["data/rendered_prompts"] == 3


def aged(*steps: tuple[int | None, ...]) -> list[dict[str, Any]]:
    """A group with a trajectory for each of `steps`, which has a turn for each of its steps."""
    [group] = groups(0, 1)
    for number, one in enumerate(group["trajectories"]):
        question, choice = one["messages_and_choices"]
        ids = [int(token["token"][9:]) for token in choice["logprobs"]["content"]]
        one["messages_and_choices"] = items = []
        for turn, step in enumerate(steps[number]):
            exact, item = ExactTokens([turn, 2], ids, [-5.5] * len(ids), step=step), dict(choice)
            exact.put(item)
            items += [question, item]
    return [group]


def test_a_step_knows_how_old_its_tokens_are_and_drops_what_is_older_than_it_may_be(
    tmp_path: Path,
) -> None:
    one = learner()
    for _ in range(3):
        assert "policy_age/mean" not in train(one, tmp_path, groups(0))[0]  # nobody knows
    row, last = train(one, tmp_path, aged((3,), (0,), (3, 2)))  # from step 3
    assert (row["policy_age/mean"], row["policy_age/max"]) == (1, 3)  # of ages 0, 3, 0 and 1
    assert last["dropped"] == [] and last["step"] == 4
    given = aged((4,), (4, 2), (None,))
    row, last = train(one, tmp_path, given, max_steps_off_policy=1)
    assert last["dropped"] == [{"reason": "stale", "group": 0, "trajectory": 1}]
    assert row["data/dropped_stale"] == 1
    assert (row["policy_age/mean"], row["policy_age/max"]) == (0, 0)


@pytest.mark.parametrize("reward", [math.nan, math.inf, None, "1"])
def test_a_reward_that_is_not_a_number_is_rejected_and_the_next_step_is_trained(
    tmp_path: Path, reward: Any
) -> None:
    one = learner()
    given = groups(0)
    given[1]["trajectories"][2]["reward"] = reward
    with pytest.raises(BadRequest, match=f"Trajectory `2` of group `1` has the reward `{reward}`"):
        train(one, tmp_path, given)
    assert checkpoint.list_steps(tmp_path) == [0]
    assert train(one, tmp_path, groups(0))[-1]["step"] == 1


@pytest.mark.parametrize("token", [260, -1])
def test_a_token_of_another_model_is_rejected(tmp_path: Path, token: int) -> None:
    given = groups(0)
    content = given[0]["trajectories"][0]["messages_and_choices"][1]["logprobs"]["content"]
    content[2]["token"] = f"token_id:{token}"
    with pytest.raises(BadRequest, match=f"token id `{token}`, and the model has `260` tokens"):
        train(learner(), tmp_path, given)


def test_lost_runs_in_a_request_change_nothing_in_the_step(tmp_path: Path) -> None:
    given, fault = groups(3), {"type": "workflow_failed", "message": "no", "traceback": ""}
    beside = [{**group, "exceptions": [fault]} for group in given]
    alone = {"trajectories": [], "exceptions": [fault], "metadata": {"example_id": "x"}}
    rows = train(learner(), tmp_path / "without", given)
    lost = train(learner(), tmp_path / "with", [*beside, alone, alone])
    assert files(tmp_path / "with", 1) == files(tmp_path / "without", 1)
    assert (
        lost[0]["data/dropped_empty_group"] == 2 and lost[0]["loss/train"] == rows[0]["loss/train"]
    )
