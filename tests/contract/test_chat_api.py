"""What agents ask of chat completions, with the real `openai` package on a real server."""

import json
from typing import Any

import httpx
import jsonschema
import openai
import pydantic
import pytest

BASE = "tiny-random@base"
HI = [{"role": "user", "content": "hi"}]


class Person(pydantic.BaseModel):
    """What a structured answer has to be."""

    name: str = pydantic.Field(max_length=8)
    age: int = pydantic.Field(ge=0, le=99)


ADD_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": ADD_SCHEMA}}
PING: Any = {"type": "function", "function": {"name": "ping"}}
TOOLS = [ADD, PING]
NAMED: Any = {"type": "function", "function": {"name": "add"}}


@pytest.fixture(params=["server", "vllm_server"], ids=["embedded", "vllm"], scope="module")
def client(request: pytest.FixtureRequest) -> Any:
    """Every test of this file runs against both engines."""
    serving = request.getfixturevalue(request.param)
    with openai.OpenAI(base_url=f"{serving.openai}/v1", api_key="any") as connected:
        yield connected


def create(client: Any, **fields: Any) -> Any:
    return client.chat.completions.create(
        **{"model": BASE, "messages": HI, "max_tokens": 200, "seed": 1, **fields}
    )


def test_a_pydantic_model_is_parsed_from_every_answer(client: Any) -> None:
    answer = client.chat.completions.parse(
        model=BASE, messages=HI, max_tokens=200, n=3, response_format=Person
    )
    assert all(isinstance(choice.message.parsed, Person) for choice in answer.choices)
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}


def test_structured_outputs_have_their_form(client: Any) -> None:
    def content(outputs: dict[str, Any]) -> str:
        answer = create(client, extra_body={"structured_outputs": outputs})
        return str(answer.choices[0].message.content)

    assert content({"choice": ["red", "green"]}) in ("red", "green")
    assert content({"regex": "[ab]{3}"}).strip("ab") == ""
    assert content({"grammar": 'start: "x" /[0-9]{2}/'}).startswith("x")
    jsonschema.validate(json.loads(content({"json": ADD_SCHEMA})), ADD_SCHEMA)


@pytest.mark.parametrize(
    ("choice", "names", "reason"),
    [("required", {"add", "ping"}, "tool_calls"), (NAMED, {"add"}, "stop")],
    ids=["required", "named"],
)
def test_a_forced_call_matches_its_schema(
    client: Any, choice: Any, names: set[str], reason: str
) -> None:
    request = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    (answer,) = create(client, **request).choices
    (call,) = answer.message.tool_calls
    assert answer.message.content is None and answer.finish_reason == reason
    assert call.function.name in names
    schema = ADD_SCHEMA if call.function.name == "add" else {"type": "object"}
    jsonschema.validate(json.loads(call.function.arguments), schema)
    with client.chat.completions.stream(
        model=BASE, messages=HI, max_tokens=200, seed=1, **request
    ) as stream:
        (streamed,) = stream.get_final_completion().choices
    (again,) = streamed.message.tool_calls
    assert (again.function.name, again.function.arguments) == (
        call.function.name,
        call.function.arguments,
    )
    assert streamed.message.content is None and streamed.finish_reason == reason


def test_penalties_and_biases_change_the_tokens_but_not_their_logprobs(client: Any) -> None:
    greedy = {"temperature": 0, "max_tokens": 6}
    plain = create(client, **greedy).choices[0]
    first = plain.token_ids[0]
    for fields in ({"logit_bias": {str(first): -100}}, {"extra_body": {"min_p": 1.0}}):
        changed = create(client, **greedy, **fields).choices[0]
        moved = changed.token_ids[0] != first
        assert moved is ("logit_bias" in fields)
    tops = create(client, **greedy, top_logprobs=3, logprobs=True).choices[0].logprobs.content
    assert [entry.top_logprobs[0].token for entry in tops] == [entry.token for entry in tops]
    assert [entry.logprob for entry in tops] == pytest.approx(
        [entry.logprob for entry in plain.logprobs.content], abs=1e-4
    )
    assert all(len(entry.top_logprobs) == 3 and entry.bytes for entry in tops)
    biased = create(client, **greedy, logit_bias={str(first): -100}).choices[0]
    second = tops[0].top_logprobs[1]
    assert biased.logprobs.content[0].token == second.token
    assert biased.logprobs.content[0].logprob == pytest.approx(second.logprob, abs=1e-4)


def test_the_length_of_an_answer_follows_its_limits(client: Any) -> None:
    longer = {"max_tokens": 12, "extra_body": {"ignore_eos": True, "min_tokens": 12}}
    assert len(create(client, **longer).choices[0].token_ids) == 12
    greedy = create(client, temperature=0, max_tokens=6).choices[0].token_ids
    stopped = create(
        client, temperature=0, max_tokens=6, extra_body={"stop_token_ids": [greedy[2]]}
    ).choices[0]
    assert stopped.token_ids == greedy[: greedy.index(greedy[2]) + 1]
    assert stopped.finish_reason == "stop"


def test_a_refusal_says_which_field_and_what_to_do(client: Any) -> None:
    hosted: Any = {"type": "web_search"}
    with pytest.raises(openai.BadRequestError) as refused:
        create(client, tools=[hosted])
    assert refused.value.param == "tools[0]" and refused.value.type == "invalid_request_error"
    assert refused.value.code == "unsupported_parameter"
    assert "`web_search`" in refused.value.message
    assert "`docs/api.md`" in refused.value.body["hint"]  # type: ignore[index]
    with pytest.raises(openai.NotFoundError, match="/v1/embeddings"):
        client.embeddings.create(model=BASE, input="x")


def test_a_schema_that_cannot_be_followed_is_refused(client: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        create(
            client,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": schema, "strict": True},
            },
        )


def test_fields_that_change_no_answer_are_taken(client: Any) -> None:
    taken = create(
        client,
        max_tokens=4,
        metadata={"run": "1"},
        store=True,
        service_tier="auto",
        user="me",
        modalities=["text"],
        prompt_cache_key="k",
        safety_identifier="s",
        verbosity="low",
        extra_body={"nvext": {"extra_fields": ["engine_data"]}, "skip_special_tokens": True},
    )
    assert taken.choices[0].token_ids == create(client, max_tokens=4).choices[0].token_ids


def test_a_rollout_keeps_forced_calls_with_their_tokens(client: Any) -> None:
    base = str(client.base_url).replace("/v1/", "/rollouts/forced/v1/")
    answer = create(client.with_options(base_url=base), tools=TOOLS, tool_choice=NAMED)
    found = httpx.get(base.replace("/v1/", ""), timeout=60).json()["choices"]
    assert found[-1]["token_ids"] == answer.choices[0].token_ids
