"""The answer of a chat, from the deltas of a request."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from trainer.base_model.resolve import resolve
from trainer.base_model.tokenizer import Tokenizer
from trainer.engines.engine import Delta
from trainer.server.chat.answer import ChatAnswer
from trainer.server.chat.request import ChatRequest

TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
NAMED = {"type": "function", "function": {"name": "add"}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve("tiny-random"))


def answer(tokenizer: Tokenizer, text: str, **fields: Any) -> tuple[ChatAnswer, list[Any]]:
    """The answer whose choice is `text`, and its chunks of a token each."""
    messages = [{"role": "user", "content": "hi"}]
    request = ChatRequest.model_validate({"model": "m", "messages": messages, **fields})
    built = ChatAnswer(request, [1, 2], tokenizer)
    tops = [[(66, -0.5), (67, -math.inf)][: request.top_logprobs]] if request.top_logprobs else []
    deltas = [Delta(0, [ord(c)], [-1.0], text=c, top_logprobs=tops) for c in text]
    deltas.append(Delta(0, [258], [-1.0], finish_reason="stop", top_logprobs=tops))
    return built, [built.chunk(0, delta)["choices"][0] for delta in deltas]


@pytest.mark.parametrize(
    ("choice", "reason"),
    [(None, "tool_calls"), ("auto", "tool_calls"), ("required", "tool_calls"), (NAMED, "stop")],
)
def test_calls_stream_as_they_complete(tokenizer: Tokenizer, choice: Any, reason: str) -> None:
    fields = {"tools": [TOOL], "tool_choice": choice}
    built, chunks = answer(tokenizer, f"Yes.\n{CALL}\n{CALL}\n", **fields)
    calls = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0, 1]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"a": 1}] * 2
    assert "tool_calls" not in chunks[-1]["delta"]  # the last call was complete before the end
    assert "".join(chunk["delta"]["content"] or "" for chunk in chunks) == "Yes."
    assert chunks[-1]["finish_reason"] == reason
    (whole,) = built.whole()["choices"]
    assert whole["message"]["content"] == "Yes." and whole["finish_reason"] == reason
    assert [call["id"] for call in whole["message"]["tool_calls"]] == [c["id"] for c in calls]


def test_a_message_of_calls_alone_has_no_content(tokenizer: Tokenizer) -> None:
    built, chunks = answer(tokenizer, f"\n{CALL}\n{CALL}\n", tools=[TOOL])
    assert built.whole()["choices"][0]["message"]["content"] is None
    assert {chunk["delta"]["content"] for chunk in chunks} == {None}


def test_without_tools_a_call_is_text(tokenizer: Tokenizer) -> None:
    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        built, _ = answer(tokenizer, CALL, **fields)
        (choice,) = built.whole()["choices"]
        assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"


def test_top_logprobs_name_tokens_by_id_and_spell_them(tokenizer: Tokenizer) -> None:
    _, chunks = answer(tokenizer, "A", top_logprobs=1, logprobs=True)
    (entry,) = chunks[0]["logprobs"]["content"]
    assert (entry["token"], entry["bytes"]) == ("token_id:65", [65])
    assert entry["top_logprobs"] == [{"token": "token_id:66", "logprob": -0.5, "bytes": [66]}]


def test_an_impossible_token_has_a_logprob_that_json_can_hold(tokenizer: Tokenizer) -> None:
    built, _ = answer(tokenizer, "A", top_logprobs=2, logprobs=True)
    assert "-9999.0" in json.dumps(built.whole(), allow_nan=False)


def test_a_client_hears_what_the_template_ignores(tmp_path: Path) -> None:
    model = Path(shutil.copytree(resolve("tiny-random"), tmp_path / "model"))
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    deaf = Tokenizer(model)
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{}"}}]}
    ignored: list[tuple[dict[str, Any], str]] = [
        ({"tools": [TOOL]}, "`tools`"),
        ({"messages": [called]}, "past tool calls"),
        ({"reasoning_effort": "high"}, "`reasoning_effort`"),
    ]
    for fields, word in ignored:
        built, _ = answer(deaf, "x", **fields)
        (warning,) = built.whole()["warnings"]
        assert word in warning
    hears: list[dict[str, Any]] = [
        {},
        {"reasoning_effort": "none"},
        {"tools": [TOOL], "tool_choice": "none"},
    ]
    assert not any("warnings" in answer(deaf, "x", **fields)[0].whole() for fields in hears)


@pytest.mark.parametrize(
    ("template", "effort", "text"),
    [
        ("{{ reasoning_effort }}", "low", "low"),
        ("{{ enable_thinking }}", "none", "False"),
        ("{{ enable_thinking }}", "high", "True"),
    ],
)
def test_reasoning_effort_reaches_the_template(
    tmp_path: Path, template: str, effort: str, text: str
) -> None:
    model = Path(shutil.copytree(resolve("tiny-random"), tmp_path / "model"))
    (model / "chat_template.jinja").write_text(template)
    thinking = Tokenizer(model)
    request = ChatRequest(model="m", messages=[{}], reasoning_effort=effort)
    assert request.sample_request(thinking, thinking.encode)[1] == text
    assert request.warnings(thinking) == []


def test_a_rollout_keeps_the_tools_that_the_model_saw(tokenizer: Tokenizer) -> None:
    for choice, shown in (("auto", [TOOL]), ("none", None)):
        built, _ = answer(tokenizer, "x", tools=[TOOL], tool_choice=choice)
        assert built.conversation()["tools"] == shown
