"""A chat request becomes a sample request: each field acts, changes nothing or is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from trainer.base_model.resolve import resolve
from trainer.base_model.tokenizer import Tokenizer
from trainer.engines.engine import SampleRequest
from trainer.errors import BadRequest
from trainer.server.chat import fields as chat_fields
from trainer.server.chat.request import ChatRequest

BASIC: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **fields}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    inner = {"mode": mode, "tools": [named(name) for name in names]}
    return {"type": "allowed_tools", "allowed_tools": inner}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(resolve("tiny-random"))


def sample(tokenizer: Tokenizer, **fields: Any) -> SampleRequest:
    return ChatRequest(**{**BASIC, **fields}).sample_request(tokenizer, tokenizer.encode)[0]


NEUTRAL = [
    *({key: "anything"} for key in sorted(chat_fields.NO_EFFECT)),
    *({key: value} for key, values in chat_fields.NEUTRAL.items() for value in values),
    *({key: None} for key in sorted(chat_fields.HINTS)),
    {"min_p": 0.0},
    {"logit_bias": {}},
    {"top_k": -1},
    {"top_k": 0},
    {"n": 1},
    {"frequency_penalty": 0},
    {"presence_penalty": 0.0},
    {"repetition_penalty": 1.0},
    {"top_logprobs": 0},
    {"logprobs": True},
    {"logprobs": False},
    {"response_format": {"type": "text"}},
    {"tools": []},
    {"tool_choice": "none"},
    {"parallel_tool_calls": False},
    {"reasoning_effort": "low"},
    {"stop": []},
    {"ignore_eos": False},
    {"stream_options": {"include_usage": True}},
    {"nvext": {"extra_fields": ["engine_data"]}},
    {"prompt_cache_options": {"mode": "explicit", "ttl": "30m"}},
]


@pytest.mark.parametrize("fields", NEUTRAL, ids=json.dumps)
def test_a_field_that_changes_no_answer_is_taken(
    tokenizer: Tokenizer, fields: dict[str, Any]
) -> None:
    assert sample(tokenizer, **fields) == sample(tokenizer)


def test_every_sampling_field_reaches_the_engine(tokenizer: Tokenizer) -> None:
    fields: dict[str, Any] = {
        "n": 2,
        "max_tokens": 9,
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": 5,
        "min_p": 0.1,
        "frequency_penalty": 0.2,
        "presence_penalty": -0.3,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "ignore_eos": True,
        "top_logprobs": 3,
        "seed": 4,
        "stream": True,
    }
    request = sample(
        tokenizer, **fields, logit_bias={"65": -100}, stop_token_ids=[66], stop="x", logprobs=True
    )
    assert {name: getattr(request, name) for name in fields} == fields
    assert request.logit_bias == ((65, -100.0),)
    assert request.stop_token_ids == (66,) and request.stop == ("x",)


REFUSED: list[tuple[dict[str, Any], str, str | None]] = [
    ({"colour": 1}, "`colour` is not supported", "colour"),
    ({"functions": [{}]}, "`functions`", "functions"),
    ({"function_call": "auto"}, "`function_call`", "function_call"),
    ({"audio": {}}, "`audio`", "audio"),
    ({"modalities": ["audio"]}, "`modalities`", "modalities"),
    ({"web_search_options": {}}, "`web_search_options`", "web_search_options"),
    ({"best_of": 2}, "`best_of`", "best_of"),
    ({"nvext": {"extra_fields": ["timing"]}}, "`timing`", "nvext.extra_fields"),
    ({"nvext": {"greed": True}}, "`nvext.greed`", "nvext.greed"),
    ({"tools": [{"type": "web_search"}]}, "`web_search`", "tools[0]"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "`custom`", "tools[0]"),
    ({"tools": [{"type": "function", "name": "x"}]}, "no `function`", "tools[0]"),
    ({"tools": [tool("a b")]}, "`a b`", "tools[0].function.name"),
    ({"tools": [tool("a"), tool("a")]}, "twice", "tools"),
    ({"tools": [tool(f"t{n}") for n in range(129)]}, "129 tools", "tools"),
    ({"tools": [tool("a")], "tool_choice": named("b")}, "`b`, which is not in", "tool_choice"),
    ({"tools": [tool("a")], "tool_choice": allowed("auto", "b")}, "`b`", "tool_choice"),
    ({"tools": [tool("a")], "tool_choice": "always"}, "`always`", "tool_choice"),
    ({"tool_choice": "required"}, "there is no tool", "tool_choice"),
    ({"response_format": {"type": "xml"}}, "`xml`", "response_format.type"),
    ({"response_format": {}}, "`None`", "response_format.type"),
    (
        {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
        "disable_additional_properties",
        None,
    ),
    ({"guided_grammar": 'root ::= "x'}, "cannot be read", "structured_outputs.grammar"),
    ({"response_format": {"type": "json_schema"}}, "schema", "response_format.json_schema"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag", None),
    ({"structured_outputs": {"json": {}, "regex": "x"}}, "2 of", "structured_outputs"),
    ({"structured_outputs": {}, "guided_json": "{"}, "schema", "structured_outputs.json"),
    (
        {"structured_outputs": {"regex": "x"}, "response_format": FORMAT},
        "contradict",
        "structured_outputs",
    ),
    (
        {"structured_outputs": {"regex": "x"}, "tools": [tool("a")], "tool_choice": "required"},
        "contradict",
        "structured_outputs",
    ),
    ({"guided_regex": "x", "structured_outputs": {"regex": "x"}}, "contradict", None),
    ({"min_tokens": 5, "max_tokens": 4}, "`min_tokens`", "min_tokens"),
    ({"top_logprobs": 2, "logprobs": False}, "`top_logprobs`", "top_logprobs"),
    ({"logit_bias": {"260": 1}}, "`260`", "logit_bias"),
    ({"stop_token_ids": [-1]}, "`-1`", "stop_token_ids"),
    ({"stream_options": {"colour": 1}}, "colour", "stream_options"),
    ({"chat_template_kwargs": {"tools": []}}, "`tools`", "chat_template_kwargs"),
]


@pytest.mark.parametrize(("fields", "message", "param"), REFUSED)
def test_a_field_that_cannot_act_is_refused_by_name(
    tokenizer: Tokenizer, fields: dict[str, Any], message: str, param: str | None
) -> None:
    with pytest.raises(BadRequest, match=re.escape(message)) as refusal:
        sample(tokenizer, **fields)
    assert refusal.value.hint
    if param:
        assert refusal.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"top_logprobs": 21},
        {"temperature": 2.5},
        {"frequency_penalty": 3},
        {"presence_penalty": -3},
        {"repetition_penalty": 0},
        {"repetition_penalty": float("inf")},
        {"logit_bias": {"1": 101}},
        {"logit_bias": {"a": 1}},
        {"min_p": 2},
        {"top_k": -2},
        {"n": 0},
        {"max_tokens": 0},
        {"stop": ["x"] * 17},
        {"reasoning_effort": "huge"},
    ],
    ids=str,
)
def test_values_outside_their_range_are_invalid(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        ChatRequest(**{**BASIC, **fields})


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"response_format": FORMAT}, "json_schema"),
        ({"response_format": {"type": "json_object"}}, "json_schema"),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema"),
        ({"structured_outputs": {"json_object": True}}, "json_schema"),
        ({"structured_outputs": {"regex": "a+"}}, "regex"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice"),
        ({"structured_outputs": {"grammar": "start: /a/"}}, "grammar"),
        ({"guided_choice": ["a", "b"]}, "choice"),
        ({"tools": [tool("a")]}, None),
        ({"tools": [tool("a")], "tool_choice": "none"}, None),
        ({"tools": [tool("a")], "tool_choice": "none", "response_format": FORMAT}, "json_schema"),
        ({"tools": [tool("a")], "response_format": FORMAT}, "grammar"),
        ({"tools": [tool("a", strict=True)]}, "grammar"),
        ({"tools": [tool("a")], "parallel_tool_calls": False}, "grammar"),
        ({"tools": [tool("a")], "tool_choice": "required"}, "grammar"),
        ({"tools": [tool("a")], "tool_choice": allowed("auto", "a")}, None),
        ({"tools": [tool("a"), tool("b")], "tool_choice": allowed("auto", "a")}, "grammar"),
    ],
)
def test_the_form_of_an_answer_becomes_a_constraint(
    tokenizer: Tokenizer, fields: dict[str, Any], kind: str | None
) -> None:
    constraint = sample(tokenizer, **fields).constraint
    assert (constraint.kind if constraint else None) == kind


def test_the_schema_of_a_json_object_counts(tokenizer: Tokenizer) -> None:
    constraint = sample(
        tokenizer, response_format={"type": "json_object", "schema": SCHEMA}
    ).constraint
    assert constraint and json.loads(constraint.value)["required"] == ["x"]


def test_a_grammar_in_the_form_of_llama_cpp_is_translated(tokenizer: Tokenizer) -> None:
    constraint = sample(tokenizer, guided_grammar='root ::= "x" [0-9]+').constraint
    assert constraint and "start:" in constraint.value and "::=" not in constraint.value


def test_tool_choice_none_hides_the_tools(tokenizer: Tokenizer) -> None:
    tools = [tool("a")]
    assert sample(tokenizer, tools=tools, tool_choice="none") == sample(tokenizer)
    assert sample(tokenizer, tools=tools).prompt_ids != sample(tokenizer).prompt_ids


def test_the_page_of_the_manual_names_every_field() -> None:
    page = (Path(__file__).parents[2] / "docs/api.md").read_text()
    fields = {*ChatRequest.model_fields, *chat_fields.NO_EFFECT, *chat_fields.NEUTRAL}
    assert [
        name for name in sorted(fields | chat_fields.HINTS.keys()) if f"`{name}" not in page
    ] == []
