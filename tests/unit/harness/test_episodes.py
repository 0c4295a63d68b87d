"""Calls are joined into episodes, and episodes become ART's JSON."""

import re
from typing import Any

import pytest

from trainer.errors import OutOfOrder
from trainer.harness import episodes
from trainer.harness.types import (
    Completion,
    EpisodeItem,
    EpisodeItemRole,
    Example,
    Failure,
    LostRun,
    Trajectory,
    TrajectoryCollection,
    WorkflowRun,
)

LOGPROBS = {"content": [{"token": "token_id:5", "logprob": -0.5, "top_logprobs": []}]}
USER = {"role": "user", "content": "hi"}


def completion(messages: list[Any], text: str, **settings: Any) -> Completion:
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "logprobs": settings.pop("logprobs", LOGPROBS),
        "message": {"role": "assistant", "content": text},
    }
    values = {"llm": "policy", "function": None, **settings}
    return Completion(messages=messages, choice=choice, **values)


def run() -> WorkflowRun:
    return WorkflowRun(Example("e", "q", "a", {}), 1, reward=0.5, metrics={"m": 2.0})


def test_turns_that_continue_each_other_are_one_conversation() -> None:
    first = completion([USER], "hello")
    # A framework's history: the same turn, with fields added and dropped.
    history = [USER, {"role": "assistant", "content": "hello", "refusal": None}]
    second = completion([*history, {"role": "user", "content": "more"}], "bye")
    trajectory = episodes.build(run(), [first, second])
    assert trajectory is not None and trajectory.additional_episodes == []
    wire = episodes.to_wire(trajectory)
    assert wire["messages_and_choices"] == [
        USER, first.choice, {"role": "user", "content": "more"}, second.choice,
    ]  # fmt: skip
    assert wire["reward"] == 0.5 and wire["metrics"] == {"m": 2.0}
    assert wire["metadata"]["example_id"] == "e"


def test_a_second_agents_conversation_is_a_separate_history() -> None:
    other = {"role": "system", "content": "You plan."}
    calls = [completion([USER], "one"), completion([other, USER], "two")]
    trajectory = episodes.build(run(), calls)
    assert trajectory is not None
    (more,) = episodes.to_wire(trajectory)["additional_histories"]
    assert more["messages_and_choices"] == [other, USER, calls[1].choice]


def test_a_branch_and_a_second_choice_train_the_shared_turns_once() -> None:
    first = completion([USER], "hello")
    history = [USER, {"role": "assistant", "content": "hello"}]
    left, right = ([*history, {"role": "user", "content": side}] for side in ("left", "right"))
    second, third = completion(left, "one"), completion(right, "two")
    other = completion(right, "three")  # the second choice of the same request
    trajectory = episodes.build(run(), [first, second, third, other])
    assert trajectory is not None
    wire = episodes.to_wire(trajectory)
    assert wire["messages_and_choices"] == [USER, first.choice, left[-1], second.choice]
    assert [each["messages_and_choices"] for each in wire["additional_histories"]] == [
        [*right, third.choice],
        [*right, other.choice],
    ]


def test_calls_of_one_tool_with_other_arguments_are_told_apart() -> None:
    def called(arguments: str) -> dict[str, Any]:
        function = {"name": "add", "arguments": arguments}
        return {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}

    calls = [completion([USER], "", tools=["add"]) for _ in range(2)]
    for call, arguments in zip(calls, ('{"a": 1}', '{"a": 2}'), strict=True):
        call.choice["message"] = called(arguments)
    result = {"role": "tool", "content": "5"}
    # Spaces differ, as frameworks write arguments in their own way.
    last = completion([USER, called('{"a":2}'), result], "5", tools=["add"])
    trajectory = episodes.build(run(), [*calls, last])
    assert trajectory is not None
    wire = episodes.to_wire(trajectory)
    assert wire["messages_and_choices"] == [USER, calls[0].choice]
    (more,) = wire["additional_histories"]
    assert more["messages_and_choices"] == [USER, calls[1].choice, result, last.choice]


def test_a_conversation_that_gets_other_tools_is_a_history_with_its_own() -> None:
    first = completion([USER], "hello", tools=["a"])
    history = [USER, {"role": "assistant", "content": "hello"}, USER]
    trajectory = episodes.build(run(), [first, completion(history, "bye", tools=["b"])])
    assert trajectory is not None
    wire = episodes.to_wire(trajectory)
    assert (wire["tools"], wire["additional_histories"][0]["tools"]) == (["a"], ["b"])


def test_an_assistant_message_that_was_not_sampled_stays_a_message() -> None:
    shown = {"role": "assistant", "content": "A: x"}
    trajectory = episodes.build(run(), [completion([USER, shown, USER], "A: y")])
    assert trajectory is not None
    wire = episodes.to_wire(trajectory)["messages_and_choices"]
    assert wire[1] == shown and "finish_reason" in wire[3]


def test_only_calls_of_the_target_functions_and_model_are_selected() -> None:
    calls = [
        completion([USER], "a", function="plan"),
        completion([USER], "b", function="act"),
        completion([USER], "c", function="act", llm="judge"),
    ]
    assert [c.text for c in episodes.select_completions(calls, ["act"], "policy")] == ["b"]
    assert [c.text for c in episodes.select_completions(calls, None, "policy")] == ["a", "b"]
    assert [c.text for c in episodes.select_completions(calls, None, None)] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("calls", "failure", "expected"),
    [
        ([], Failure.NO_CALLS, "no call"),
        (
            [completion([USER], "x", logprobs=None)],
            Failure.NO_LOGPROBS,
            "No valid assistant messages with logprobs",
        ),
        (
            [completion([{"role": "assistant", "content": "x"}], "y", recorded=False)],
            Failure.OUT_OF_ORDER,
            "two assistant messages in a row|starts with `assistant`",
        ),
    ],
)
def test_a_run_that_cannot_be_trained_on_records_the_reason(
    calls: list[Completion], failure: Failure, expected: str
) -> None:
    one = run()
    assert episodes.build(one, calls) is None
    assert one.failure is failure and re.search(expected, one.error)


def test_order_is_not_checked_for_recorded_completions() -> None:
    odd = [{"role": "assistant", "content": "x"}]
    assert episodes.build(run(), [completion(odd, "y", recorded=True)]) is not None


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ([], "is empty"),
        (["tool", "assistant"], "starts with `tool`"),
        (["user", "assistant", "assistant"], "two assistant messages in a row"),
    ],
)
def test_an_episode_out_of_order_is_rejected(roles: list[str], expected: str) -> None:
    items = [EpisodeItem(role=EpisodeItemRole(role), content="") for role in roles]
    with pytest.raises(OutOfOrder, match=expected):
        episodes.check_order(items)


def test_an_episode_made_by_hand_becomes_a_choice_with_its_logprobs() -> None:
    items = [
        EpisodeItem(role=EpisodeItemRole.USER, content="q"),
        EpisodeItem(role=EpisodeItemRole.ASSISTANT, content="a", logprobs=LOGPROBS),
    ]
    episodes.check_order(items)
    wire = episodes.to_wire(Trajectory(episode=items, reward=1.0))
    assert wire["messages_and_choices"] == [
        {"role": "user", "content": "q"},
        {
            "index": 0,
            "finish_reason": "stop",
            "logprobs": LOGPROBS,
            "message": {"role": "assistant", "content": "a"},
        },
    ]


def test_reasons_travel_as_metadata_of_training_and_validation() -> None:
    one = run()
    one.reasons = {"judge": "It is short.", "judge/style": "plain"}
    one.completions = [completion([USER], "hello")]
    trained = episodes.build(one, one.completions)
    assert trained is not None
    (validated,) = episodes.validation_group(one)["trajectories"]
    for metadata in (episodes.to_wire(trained)["metadata"], validated["metadata"]):
        assert metadata["reason/judge"] == "It is short."
        assert metadata["reason/judge/style"] == "plain" and metadata["example_id"] == "e"


def test_lost_runs_are_exceptions_of_their_example_and_come_last_without_one() -> None:
    trained = episodes.build(run(), [completion([USER], "hello")])
    assert trained is not None
    lost, other = run(), WorkflowRun(Example("f", "q", "a", {}), 0)
    lost.fail(Failure.TIMEOUT, "too late")
    other.fail(Failure.WORKFLOW, "KeyError: 'x'")
    found = episodes.lost([[run(), lost], [other, other]])
    late = LostRun(example_id="e", reason="workflow_timed_out", error="too late")
    assert found[0] == late and len(found) == 3
    collection = TrajectoryCollection(trajectories=[[trained]], run_id="r", lost=found)
    # What a killed program finds again is sent unchanged, so that the step is not trained twice.
    again = TrajectoryCollection.model_validate(collection.model_dump(mode="json"))
    first, second = episodes.wire_groups(again)
    assert first["trajectories"] == [episodes.to_wire(trained)]
    message = {"type": "workflow_timed_out", "message": "too late", "traceback": ""}
    assert first["exceptions"] == [message]
    assert second["trajectories"] == [] and len(second["exceptions"]) == 2
    assert second["metadata"] == {"example_id": "f"}
