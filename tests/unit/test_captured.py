"""Exchanges that openpipe-art recorded become choices that are trained once, or are refused."""

from pathlib import Path
from typing import Any

import pytest

from trainer.base_model.resolve import resolve
from trainer.base_model.tokenizer import Tokenizer
from trainer.errors import BadRequest
from trainer.server import captured
from trainer.server.ledger import Entry, Ledger
from trainer.server.matching import choices_of, recall

TOKENIZER = Tokenizer(resolve("tiny-random"))
QUESTION = {"role": "user", "content": "Hi"}


def choice(id: str | None, text: str, index: int = 0) -> dict[str, Any]:
    message = {"role": "assistant", "content": text, "refusal": None, "annotations": None}
    return {"index": index, "finish_reason": "stop", "message": message, "choice_id": id}


def chat(messages: list[Any], *choices: Any, at: int = 0, **request: Any) -> dict[str, Any]:
    return {
        "request": {"model": "m@0", "messages": messages, **request},
        "response": {"id": "x", "model": "m@0", "choices": list(choices)},
        "start_time": f"2026-11-16T00:00:{at:02}Z",
        "model": "m@0",
    }


def groups(**exchanges: Any) -> list[dict[str, Any]]:
    return [{"trajectories": [{"exchanges": exchanges}]}]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    ledger = Ledger(tmp_path / "ledger.db")
    samples = ("p/m", "a"), ("p/m", "b"), ("p/m", "c"), ("p/other", "strange"), ("", "strange")
    for number, (model, text) in enumerate(samples):
        entry = Entry(
            model=model,
            step=0,
            lora_sha256="",
            rollout=None,
            prompt_ids=[1, number],
            completion_ids=[7],
            logprobs=[-0.1],
            id=f"id-{number}",
        )
        ledger.record(entry, text)
    return ledger


def ids(trained: list[dict[str, Any]]) -> list[Any]:
    return [choice["choice_id"] for choice in choices_of(trained)]


def test_the_turns_of_a_conversation_are_one_history_and_each_choice_is_trained_once() -> None:
    later = [QUESTION, {"role": "assistant", "content": "a"}, QUESTION]
    found = groups(
        chat_completions=[
            chat(later, choice("id-1", "b"), at=2),  # recorded first, but it began second
            chat([QUESTION], choice("id-0", "a"), at=1),
        ]
    )
    assert len(captured.to_histories(found, supervised=False)) == 2
    [trajectory] = found[0]["trajectories"]
    assert "exchanges" not in trajectory and not trajectory["additional_histories"]
    assert ids(found) == ["id-0", "id-1"]


def test_branches_tools_and_several_choices_are_histories_of_their_own() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    found = groups(
        chat_completions=[
            chat([QUESTION], choice("id-0", "a"), choice("id-1", "b", 1), tools=[tool]),
            chat([QUESTION], choice("id-2", "c"), at=1),
        ]
    )
    captured.to_histories(found, supervised=False)
    [trajectory] = found[0]["trajectories"]
    assert trajectory["tools"] == [tool]
    assert [history["tools"] for history in trajectory["additional_histories"]] == [[tool], None]
    assert ids(found) == ["id-0", "id-1", "id-2"]


def test_every_api_is_trained_by_the_id_in_its_answer(ledger: Ledger) -> None:
    def exchange(response: Any) -> dict[str, Any]:
        return {"request": {"model": "m"}, "response": response, "start_time": "1"}

    part = {"type": "output_text", "text": "b"}
    found = groups(
        completions=[exchange({"choices": [{"text": "a", "choice_id": "id-0"}]})],
        responses=[exchange({"output": [{"content": [part], "choice_id": "id-1"}]})],
        messages=[exchange({"content": [{"type": "text", "text": "c"}], "choice_id": "id-2"})],
    )
    captured.check(captured.to_histories(found, supervised=False), ledger, "p/m", TOKENIZER)
    recall(ledger, found, TOKENIZER)
    assert all("art" in choice for choice in choices_of(found))


@pytest.mark.parametrize(
    ("id", "said"),
    [
        ("id-9", "that this server did not sample"),
        (None, "that this server did not sample"),
        ("id-3", "was sampled from `p/other`, not `p/m`"),
        ("id-4", "was sampled from `the base model`"),
    ],
)
def test_what_the_run_did_not_sample_is_refused_by_name(
    ledger: Ledger, id: str | None, said: str
) -> None:
    found = groups(chat_completions=[chat([QUESTION], choice(id, "strange"))])
    choices = captured.to_histories(found, supervised=False)
    with pytest.raises(BadRequest, match="`chat_completions` exchange with `m@0`") as error:
        captured.check(choices, ledger, "p/m", TOKENIZER)
    assert said in str(error.value) and "art.no_capture()" in str(error.value)


def test_empty_lists_of_exchanges_are_no_exchanges() -> None:
    trajectory = {
        "exchanges": {"responses": [], "messages": []},
        "messages_and_choices": [QUESTION],
    }
    assert captured.to_histories([{"trajectories": [trajectory]}], supervised=False) == []
    assert trajectory == {"messages_and_choices": [QUESTION]}


def test_supervised_training_takes_the_chats_of_any_model(ledger: Ledger) -> None:
    found = groups(chat_completions=[chat([QUESTION], choice(None, "strange"))])
    captured.check(captured.to_histories(found, supervised=True), ledger, "p/m", TOKENIZER)
    assert ids(found) == [None]
    other = groups(messages=[{"request": {}, "response": {"content": []}}])
    with pytest.raises(BadRequest, match="`messages` exchange"):
        captured.check(captured.to_histories(other, supervised=True), ledger, "p/m", TOKENIZER)


@pytest.mark.parametrize(
    ("trajectory", "said"),
    [
        ({"exchanges": {"videos": [{}]}}, "`videos`, which is not supported"),
        ({"exchanges": [1]}, "not an object"),
        ({"exchanges": {"responses": [1]}}, "invalid exchange"),
        ({"exchanges": {"chat_completions": [{"request": {}}]}}, "invalid exchange"),
        ({"exchanges": {"chat_completions": True}}, "invalid exchange"),
        ({"exchanges": {"chat_completions": [chat([7], choice("a", "b"))]}}, "invalid exchange"),
        ({"exchanges": {"messages": [{}]}, "messages_and_choices": [QUESTION]}, "has both"),
    ],
)
def test_exchanges_that_cannot_be_read_are_refused(trajectory: Any, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        captured.to_histories([{"trajectories": [trajectory]}], supervised=False)
