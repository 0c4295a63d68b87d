"""The translation between Anthropic's Messages API and a chat, and its errors."""

import json
from collections.abc import AsyncGenerator
from typing import Any

import pydantic
import pytest
from fastapi.exceptions import RequestValidationError

from trainer.errors import BadRequest, Unsupported, WorkerDied
from trainer.server.guard import Guard
from trainer.server.messages.answer import MessageAnswer, events
from trainer.server.messages.errors import AnthropicErrors
from trainer.server.messages.request import CountRequest, MessagesRequest

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
TOOL = {"name": "add", "description": "Adds", "input_schema": {"type": "object"}}


def chat(**fields: Any) -> Any:
    user = {"role": "user", "content": "hi"}
    body = {"model": "m", "max_tokens": 5, "messages": [user], **fields}
    return MessagesRequest.model_validate(body).as_chat()


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def test_blocks_become_messages_calls_and_results() -> None:
    call = {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}
    failed = {"type": "tool_result", "tool_use_id": "c2", "is_error": True, "content": "no"}
    made = chat(
        system=[{**text("Be brief"), "cache_control": {"type": "ephemeral"}}, text("Be kind")],
        messages=[
            {"role": "user", "content": "1+1?"},
            {"role": "user", "content": [text("Well?")]},
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "Hm"}, text("I add."), call],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [text("2")]},
                    failed,
                    text("Go on"),
                ],
            },
        ],
    )
    function = {"name": "add", "arguments": '{"a": 1}'}
    assert made.messages == [
        {"role": "system", "content": "Be brief\nBe kind"},
        {"role": "user", "content": "1+1?\nWell?"},
        {
            **{"role": "assistant", "content": "I add.", "reasoning_content": "Hm"},
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "tool", "tool_call_id": "c2", "content": "Error: no"},
        {"role": "user", "content": "Go on"},
    ]


def test_a_system_message_may_stand_among_the_others() -> None:
    user = {"role": "user", "content": "hi"}
    later = {"role": "system", "content": [text("Be kind"), text("Be brief")]}
    made = {"role": "system", "content": "Be kind\nBe brief"}
    assert chat(messages=[user, later]).messages == [user, made]
    count = CountRequest.model_validate({"model": "m", "messages": [later, user]})
    assert count.chat().messages == [made, user]
    # Many chat templates accept a single system message only.
    joined = {"role": "system", "content": "Be fair\n\nBe kind\nBe brief"}
    assert chat(system="Be fair", messages=[later, user]).messages == [joined, user]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, {}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        (
            {"type": "tool", "name": "add", "disable_parallel_tool_use": True},
            {
                "tool_choice": {"type": "function", "function": {"name": "add"}},
                "parallel_tool_calls": False,
            },
        ),
    ],
)
def test_tools_and_the_choice_among_them_reach_the_chat(choice: Any, expected: Any) -> None:
    sent = chat(tools=[TOOL], tool_choice=choice).model_dump(exclude_unset=True)
    function = {"name": "add", "parameters": {"type": "object"}, "description": "Adds"}
    assert sent["tools"] == [{"type": "function", "function": function}]
    chosen = {key: sent[key] for key in ("tool_choice", "parallel_tool_calls") if key in sent}
    assert chosen == expected


def test_the_settings_reach_the_chat() -> None:
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    output = {"format": schema, "effort": "max"}
    made = chat(stop_sequences=["END"], temperature=0.5, top_k=3, output_config=output)
    sent = made.model_dump(exclude_unset=True)
    assert (sent["max_tokens"], sent["stop"], sent["temperature"]) == (5, ["END"], 0.5)
    assert sent["reasoning_effort"] == "max"
    assert chat(thinking={"type": "disabled"}).reasoning_effort == "none"
    assert sent["top_k"] == 3 and sent["response_format"]["type"] == "json_schema"


@pytest.mark.parametrize(
    ("stop", "expected"), [("B", ["A", "B"]), (["B", "C"], ["A", "B", "C"]), (None, ["A"])]
)
def test_stop_strings_may_come_under_the_name_of_a_chat_too(stop: Any, expected: Any) -> None:
    assert chat(stop_sequences=["A"], stop=stop).stop == expected
    assert chat(stop="B").stop == ["B"]


@pytest.mark.parametrize(
    "neutral",
    [
        *({"thinking": {"type": "adaptive"}}, {"metadata": {"user_id": "me"}}, {"tools": []}),
        *({"service_tier": "auto"}, {"cache_control": {"type": "ephemeral"}}, {"mcp_servers": []}),
        {"output_config": {"effort": None, "task_budget": None}},
    ],
)
def test_a_setting_that_changes_nothing_is_taken(neutral: Any) -> None:
    assert chat(**neutral).messages == chat().messages


IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "`thinking`"),
        ({"container": "c"}, "`container`"),
        ({"nonsense": 1}, "`nonsense`"),
        ({"output_config": {"task_budget": 5}}, "`output_config.task_budget`"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "`image`"),
        ({"messages": [{"role": "system", "content": [IMAGE]}]}, "`image`"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "`web_search_2025"),
        ({"messages": [{"role": "assistant", "content": "I"}]}, "last message"),
    ],
)
def test_an_unsupported_setting_is_refused_by_name(fields: Any, name: str) -> None:
    with pytest.raises(Unsupported, match=name):
        chat(**fields)


def test_a_faulty_request_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"`tools\[0\].input_schema`"):
        chat(tools=[{"name": "add"}])
    for content in (3, {"type": "text"}):
        result = {"type": "tool_result", "tool_use_id": "c", "content": content}
        with pytest.raises(BadRequest, match="is not text"):
            chat(messages=[{"role": "user", "content": [result]}])
    with pytest.raises(BadRequest, match=r"`output_config[.]format`"):
        chat(output_config={"format": "json"})
    with pytest.raises(RequestValidationError, match="reasoning_effort"):
        chat(output_config={"effort": ["low"]})
    with pytest.raises(BadRequest, match="`sometimes`"):
        chat(tools=[TOOL], tool_choice={"type": "sometimes"})
    with pytest.raises(pydantic.ValidationError, match="max_tokens"):
        chat(max_tokens=0)


def chunk(finish_reason: str | None = None, **delta: Any) -> Any:
    choice = {"choice_id": "abc", "finish_reason": finish_reason, "token_ids": [1], "delta": delta}
    return {"policy_step": 3, "choices": [choice]}


def test_the_events_of_a_stream_open_one_block_at_a_time() -> None:
    answer = MessageAnswer("m", lambda _: None)
    call = {"index": 0, "id": "c1", "function": {"name": "add", "arguments": '{"a"'}}
    rest = {"index": 0, "function": {"arguments": ": 1}"}}
    chunks = [
        chunk(content="I "),
        chunk(content="add"),
        chunk(tool_calls=[call]),
        chunk(finish_reason="tool_calls", tool_calls=[rest]),
    ]
    sent = [*answer.begin(chunks[0], 3), *(e for c in chunks for e in answer.add(c))]
    sent += [*answer.end(), *answer.last(USAGE)]
    assert [event["type"].removeprefix("content_block_") for event in sent] == [
        *("message_start", "ping", "start", "delta", "delta", "stop"),
        *("start", "delta", "delta", "stop", "message_delta", "message_stop"),
    ]
    assert sent[0]["message"]["content"] == [] and sent[0]["message"]["choice_id"] == "abc"
    assert sent[6]["content_block"]["input"] == {}
    assert sent[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    whole = answer.whole(USAGE)
    assert whole["content"] == [
        {"type": "text", "text": "I add"},
        {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
    ]
    assert whole["policy_step"] == 3 and whole["usage"]["output_tokens"] == 2


@pytest.mark.parametrize(
    ("reason", "sequence", "expected"),
    [("stop", None, "end_turn"), ("stop", "END", "stop_sequence"), ("length", "E", "max_tokens")],
)
def test_the_reason_to_stop_has_anthropics_name(
    reason: str, sequence: str | None, expected: str
) -> None:
    answer = MessageAnswer("m", lambda _: sequence)
    list(answer.add(chunk(finish_reason=reason)))
    list(answer.end())
    whole = answer.whole(USAGE)
    assert whole["stop_reason"] == expected
    assert whole["stop_sequence"] == (sequence if expected == "stop_sequence" else None)
    assert whole["content"] == [text("")]


async def test_a_stream_that_breaks_off_ends_with_its_error() -> None:
    async def chunks() -> AsyncGenerator[Any, None]:
        yield chunk(content="I")
        raise WorkerDied("The engine died")

    stream = events(MessageAnswer("m", lambda _: None), chunks(), 3, lambda: USAGE)
    sent = [json.loads(line.partition("data: ")[2]) async for line in stream]
    assert sent[-1]["type"] == "error" and sent[-1]["error"]["type"] == "overloaded_error"
    assert "The engine died" in sent[-1]["error"]["message"]


async def post(path: str, **headers: str) -> tuple[int, Any]:
    """Send a request through the guard, which requires a key, to an app that fails."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = b'{"detail": "No", "error": {"message": "No `x`", "hint": "Send `y`"}}'
        await send({"type": "http.response.start", "status": 400, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}"}

    async def send(message: Any) -> None:
        sent.append(message)

    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": path, "headers": raw}
    await AnthropicErrors(Guard(app, key="secret"))(scope, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


async def test_errors_have_anthropics_shape_on_its_routes_only() -> None:
    status, body = await post("/rollouts/r/v1/messages", authorization="Bearer secret")
    assert status == 400
    error = {"type": "invalid_request_error", "message": "No `x`. Send `y`"}
    assert body == {"type": "error", "error": error}
    status, body = await post("/v1/responses", authorization="Bearer secret")
    assert status == 400 and body["detail"] == "No"


async def test_the_key_may_come_as_x_api_key() -> None:
    status, body = await post("/v1/messages", x_api_key="wrong")
    assert status == 401 and body["error"]["type"] == "authentication_error"
    assert (await post("/v1/messages", x_api_key="secret"))[0] == 400
    assert (await post("/v1/models", x_api_key="secret"))[0] == 400
