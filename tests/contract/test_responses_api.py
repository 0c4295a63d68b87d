"""OpenAI's Responses API, driven by the real `openai` package."""

import sqlite3
from array import array
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.serving import Serving

BASE = "tiny-random@base"  # other tests of this server train models
LOGPROBS: Any = ["message.output_text.logprobs"]


@pytest.fixture
def client(server: Serving) -> Iterator[openai.OpenAI]:
    base_url = f"{server.openai}/rollouts/responses/v1"
    with openai.OpenAI(base_url=base_url, api_key="any", max_retries=0) as client:
        yield client


def entry(server: Serving, choice_id: str) -> tuple[list[int], list[int], str]:
    """The prompt, completion and rollout that the ledger holds for a choice."""
    with sqlite3.connect(server.state / "ledger.db") as ledger:
        prompt, completion, rollout = ledger.execute(
            "SELECT prompt_ids, completion_ids, rollout FROM completions WHERE choice_id = ?",
            (choice_id,),
        ).fetchone()
    return array("i", prompt).tolist(), array("i", completion).tolist(), rollout


def test_a_response_is_recorded_like_a_chat(server: Serving, client: openai.OpenAI) -> None:
    response: Any = client.responses.create(
        model=BASE, input="Hello", instructions="Be brief", max_output_tokens=5, include=LOGPROBS
    )
    message = response.output[0]
    ids = [int(t.token.removeprefix("token_id:")) for t in message.content[0].logprobs]
    prompt, completion, rollout = entry(server, message.choice_id)
    assert completion == ids and len(ids) == response.usage.output_tokens
    assert len(prompt) == response.usage.input_tokens and rollout == "responses"
    assert response.choice_id == message.choice_id and response.policy_step == 0
    recorded = httpx.get(f"{server.openai}/rollouts/responses", timeout=60).json()
    last = recorded["completions"][-1]
    assert last["messages"] == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "Hello"},
    ]
    assert last["choices"][0]["choice_id"] == message.choice_id
    assert last["choices"][0]["message"]["content"] == response.output_text


def test_a_stream_adds_up_to_the_response_it_stores(client: openai.OpenAI) -> None:
    request: Any = {"model": BASE, "input": "hi", "max_output_tokens": 6, "extra_body": {"seed": 3}}
    whole = client.responses.create(**request)
    with client.responses.stream(**request, include=LOGPROBS) as stream:
        events: list[Any] = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = list(dict.fromkeys(event.type.removeprefix("response.") for event in events))
    last = "incomplete" if whole.status == "incomplete" else "completed"
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.done", "content_part.done", "output_item.done", last),
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    final = events[-1].response
    assert text == final.output_text == whole.output_text
    assert len(final.output[0].content[0].logprobs) == final.usage.output_tokens
    stored = client.responses.retrieve(final.id)
    assert stored.output == final.output and stored.usage == final.usage


def test_a_response_continues_the_one_before(server: Serving, client: openai.OpenAI) -> None:
    first: Any = client.responses.create(
        model=BASE, input="One", instructions="Be brief", max_output_tokens=4
    )
    second: Any = client.responses.create(
        model=BASE, input="Two", previous_response_id=first.id, max_output_tokens=4
    )
    items: Any = [
        {"role": "user", "content": "One"},
        first.output[0].model_dump(exclude_unset=True),
        {"role": "user", "content": "Two"},
    ]
    stateless: Any = client.responses.create(model=BASE, input=items, max_output_tokens=4)
    items[1] = {"type": "item_reference", "id": first.output[0].id}
    referred: Any = client.responses.create(model=BASE, input=items, max_output_tokens=4)
    prompts = [entry(server, r.choice_id)[0] for r in (second, stateless, referred)]
    assert prompts[0] == prompts[1] == prompts[2]
    client.responses.delete(first.id)
    for gone in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match=first.id):
            gone(first.id)
    third = client.responses.create(
        model=BASE, input="3", previous_response_id=second.id, max_output_tokens=1
    )
    assert third.previous_response_id == second.id


def test_a_response_that_is_not_stored_cannot_be_continued(client: openai.OpenAI) -> None:
    response = client.responses.create(model=BASE, input="One", store=False, max_output_tokens=1)
    with pytest.raises(openai.NotFoundError, match=f"`{response.id}`"):
        client.responses.create(model=BASE, input="Two", previous_response_id=response.id)
    with pytest.raises(openai.NotFoundError, match="`nope`"):
        client.responses.create(model="nope", input="Two")


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"conversation": "c"}, "`conversation`"),
        ({"tools": [{"type": "web_search"}]}, "`web_search`"),
        ({"extra_body": {"nonsense": 1}}, "`nonsense`"),
    ],
)
def test_an_unsupported_setting_is_refused_by_name(
    client: openai.OpenAI, fields: Any, name: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=name):
        client.responses.create(model=BASE, input="x", **fields)
