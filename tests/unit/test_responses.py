"""The translation between OpenAI's Responses API and a chat, and the store of responses."""

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from trainer.errors import BadRequest, NotFound, Unsupported, WorkerDied
from trainer.server.responses.answer import ResponseAnswer, events
from trainer.server.responses.items import messages_of, with_instructions
from trainer.server.responses.request import ResponsesRequest
from trainer.server.responses.store import ResponseStore

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def no_items(item_id: str) -> Any:
    raise NotFound(f"There is no stored item `{item_id}`", hint="")


def request(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate({"model": "m", "input": "hi", **fields})


def chat(**fields: Any) -> Any:
    body = request(**fields)
    return body.chat(body.new_messages(no_items))


def test_the_items_of_one_turn_become_one_message() -> None:
    items: list[Any] = [
        {"role": "developer", "content": "Be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "1+1?"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": None},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "Hm"}]},
        {
            **{"type": "message", "role": "assistant", "id": "m", "status": "completed"},
            "content": [{"type": "output_text", "text": "I add.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"role": "assistant", "content": "Two"},
        {"role": "assistant", "content": "Really"},
    ]
    assert messages_of(items, no_items) == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "1+1?"},
        {
            **{"role": "assistant", "content": "I add."},
            **{"reasoning_content": "Hm", "tool_calls": [CALL]},
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "assistant", "content": "Two"},
        {"role": "assistant", "content": "Really"},
    ]


def test_instructions_join_the_system_messages_that_follow_them() -> None:
    system = {"role": "system", "content": "B"}
    user = {"role": "user", "content": "hi"}
    assert with_instructions("A", [system, user]) == [{"role": "system", "content": "A\n\nB"}, user]
    assert with_instructions(None, [user]) == [user]


@pytest.mark.parametrize(
    ("item", "error", "message"),
    [
        ({"type": "web_search_call", "id": "x"}, Unsupported, "`web_search_call`"),
        ({"role": "user", "content": [{"type": "input_image"}]}, Unsupported, "`input_image`"),
        ({"type": "reasoning", "summary": [], "encrypted_content": "x"}, Unsupported, "encrypted"),
        ({"type": "item_reference", "id": "msg_1"}, NotFound, "`msg_1`"),
        ({"type": "function_call", "name": "add"}, BadRequest, "`input[0].call_id`"),
        ({"role": "robot", "content": "x"}, BadRequest, "`robot`"),
        ({"role": "user"}, BadRequest, "`input[0].content`"),
    ],
)
def test_an_item_that_cannot_be_used_is_refused_by_name(
    item: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message.replace("[", r"\[")):
        messages_of([item], no_items)


def test_the_settings_reach_the_chat() -> None:
    schema = {"type": "object"}
    made = chat(
        instructions="Be brief",
        max_output_tokens=7,
        tools=[{"type": "function", "name": "add", "parameters": schema, "strict": True}],
        tool_choice={"type": "function", "name": "add"},
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
        reasoning={"effort": "low", "summary": None},
        top_logprobs=2,
        seed=5,
    )
    sent = made.model_dump(exclude_unset=True)
    assert sent["messages"][0] == {"role": "system", "content": "Be brief"}
    assert sent["max_tokens"] == 7 and sent["seed"] == 5 and sent["top_logprobs"] == 2
    function = {"name": "add", "parameters": schema, "strict": True}
    assert sent["tools"] == [{"type": "function", "function": function}]
    assert sent["tool_choice"] == {"type": "function", "function": {"name": "add"}}
    assert sent["parallel_tool_calls"] is False and sent["reasoning_effort"] == "low"
    assert sent["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": schema, "strict": True},
    }


@pytest.mark.parametrize(
    "neutral",
    [
        *({"metadata": {"a": "b"}}, {"truncation": "disabled"}, {"background": False}),
        *({"user": "me"}, {"service_tier": "auto"}, {"conversation": None}, {"tools": []}),
        *({"include": ["reasoning.encrypted_content"]}, {"text": {"verbosity": "low"}}),
        {"tool_choice": "auto", "parallel_tool_calls": True},
        {"reasoning": {"summary": "auto", "generate_summary": "concise", "effort": None}},
        {"reasoning": {"mode": "standard", "context": "auto", "nonsense": None}},
    ],
)
def test_a_setting_that_changes_nothing_is_taken(neutral: Any) -> None:
    assert chat(**neutral).messages == chat().messages


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"truncation": "auto"}, "`truncation`"),
        ({"background": True}, "`background`"),
        ({"conversation": "c"}, "`conversation`"),
        ({"prompt": {"id": "p"}}, "`prompt`"),
        ({"nonsense": 1}, "`nonsense`"),
        ({"include": ["file_search_call.results"]}, "`file_search_call.results`"),
        ({"tools": [{"type": "web_search"}]}, "`web_search`"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "`custom`"),
        ({"tool_choice": {"type": "mcp"}}, "`mcp`"),
        ({"text": {"format": {"type": "grammar"}}}, "`grammar`"),
        ({"text": {"nonsense": 1}}, "`text.nonsense`"),
        ({"reasoning": {"nonsense": 1}}, "`reasoning.nonsense`"),
        ({"reasoning": {"mode": "pro"}}, "`reasoning.mode`"),
        ({"reasoning": {"context": "all_turns"}}, "`reasoning.context`"),
    ],
)
def test_an_unsupported_setting_is_refused_by_name(fields: Any, name: str) -> None:
    with pytest.raises(Unsupported, match=name):
        chat(**fields)


def test_a_format_that_is_no_object_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"`text[.]format`"):
        chat(text={"format": "json"})


def chunk(finish_reason: str | None = None, **delta: Any) -> Any:
    tokens = [{"token": "token_id:1", "logprob": -0.5, "bytes": None, "top_logprobs": []}]
    choice = {
        **{"index": 0, "choice_id": "abc", "finish_reason": finish_reason, "token_ids": [1]},
        **{"logprobs": {"content": tokens}, "delta": delta},
    }
    return {"policy_step": 3, "choices": [choice]}


def test_the_deltas_of_a_stream_add_up_to_its_last_event() -> None:
    answer = ResponseAnswer(request(include=["message.output_text.logprobs"]))
    call = {"index": 0, "id": "c1", "function": {"name": "add", "arguments": '{"a"'}}
    rest = {"index": 0, "function": {"arguments": ": 1}"}}
    chunks = [
        chunk(content="I "),
        chunk(content="add"),
        chunk(tool_calls=[call]),
        chunk(finish_reason="tool_calls", content=".", tool_calls=[rest]),
    ]
    sent = [*answer.begin(chunks[0]), *(e for c in chunks for e in answer.add(c))]
    sent += [*answer.end(), answer.last(USAGE)]
    assert [event["sequence_number"] for event in sent] == list(range(len(sent)))
    response = sent[-1]["response"]
    assert sent[-1]["type"] == "response.completed" and response["policy_step"] == 3
    message, function = response["output"]
    texts = [e["delta"] for e in sent if e["type"] == "response.output_text.delta"]
    assert "".join(texts) == message["content"][0]["text"] == "I add."
    pieces = [e["delta"] for e in sent if e["type"] == "response.function_call_arguments.delta"]
    assert "".join(pieces) == function["arguments"] == '{"a": 1}'
    assert function["call_id"] == "c1" and function["id"] != message["id"]
    assert {response["choice_id"], message["choice_id"], function["choice_id"]} == {"abc"}
    assert len(message["content"][0]["logprobs"]) == 4
    done = [event["item"] for event in sent if event["type"] == "response.output_item.done"]
    assert done == response["output"]


@pytest.mark.parametrize("content", ["I", ""])
def test_tokens_before_the_first_text_keep_their_logprobs(content: str) -> None:
    streamed, whole = (
        ResponseAnswer(request(include=["message.output_text.logprobs"])) for _ in range(2)
    )
    chunks = [chunk(content=None), chunk(content=content), chunk("stop", content=None)]
    sent = [event for each in chunks for event in streamed.add(each)]
    sent += streamed.end()
    together = chunk("stop", content=content)
    together["choices"][0]["logprobs"]["content"] *= 3
    list(whole.add(together))
    list(whole.end())
    (part,) = streamed.output[0]["content"]
    assert part == whole.output[0]["content"][0] and len(part["logprobs"]) == 3
    deltas = [event for event in sent if event["type"] == "response.output_text.delta"]
    assert [len(delta["logprobs"]) for delta in deltas] == ([2] if content else [])


def test_an_answer_that_is_cut_off_is_incomplete() -> None:
    answer = ResponseAnswer(request())
    call = {"index": 0, "id": "c1", "function": {"name": "add", "arguments": "{}"}}
    cut_off = chunk(finish_reason="length", content="I", tool_calls=[call])
    sent = [*answer.add(cut_off), *answer.end()]
    last = answer.last(USAGE)
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    done = [event["item"] for event in sent if event["type"] == "response.output_item.done"]
    assert [item["status"] for item in done] == ["incomplete", "completed"]


async def test_a_stream_that_breaks_off_ends_with_its_error() -> None:
    async def chunks() -> AsyncGenerator[Any, None]:
        yield chunk(content="I")
        raise WorkerDied("The engine died")

    stream = events(ResponseAnswer(request()), chunks(), lambda: USAGE)
    sent = [json.loads(line.partition("data: ")[2]) async for line in stream]
    assert [event["type"] for event in sent[-2:]] == ["error", "response.failed"]
    assert "The engine died" in sent[-2]["message"]
    assert sent[-1]["response"]["status"] == "failed"
    assert "The engine died" in sent[-1]["response"]["error"]["message"]


def body(number: int) -> Any:
    return {"id": f"resp_{number}", "output": [{"id": f"msg_{number}", "type": "message"}]}


def test_stored_responses_survive_a_restart_until_newer_ones_replace_them(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "r.db", kept=3)
    for number in range(4):
        store.put(body(number), [{"role": "user", "content": str(number)}])
    store.close()
    store = ResponseStore(tmp_path / "r.db", kept=3)
    assert store.get("resp_3") == body(3)
    assert store.messages("resp_1") == [{"role": "user", "content": "1"}]
    assert store.item("msg_2")["type"] == "message"
    for lost in (store.get, store.messages, store.delete):
        with pytest.raises(NotFound, match="`resp_0`"):
            lost("resp_0")
    with pytest.raises(NotFound, match="`msg_0`"):
        store.item("msg_0")
    store.delete("resp_3")
    with pytest.raises(NotFound, match="`msg_3`"):
        store.item("msg_3")
    store.close()


def test_stored_responses_are_bounded_in_bytes(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "r.db", kept_bytes=1000)
    for number in range(3):
        store.put(body(number), [{"role": "user", "content": "x" * 400}])
    store.close()
    store = ResponseStore(tmp_path / "r.db", kept_bytes=1000)
    assert store.get("resp_1") and store.get("resp_2")
    with pytest.raises(NotFound):
        store.get("resp_0")
    store.close()
