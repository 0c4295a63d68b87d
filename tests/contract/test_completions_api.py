"""OpenAI's legacy completions, driven by the real `openai` package."""

import sqlite3
from array import array
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.serving import Serving

BASE = "tiny-random"


@pytest.fixture(params=["server", "vllm_server"], ids=["embedded", "vllm"])
def serving(request: pytest.FixtureRequest) -> Any:
    """Every test of this file runs against both engines."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def client(serving: Serving) -> Iterator[openai.OpenAI]:
    base_url = f"{serving.openai}/rollouts/completions/v1"
    with openai.OpenAI(base_url=base_url, api_key="any", max_retries=0) as client:
        yield client


def test_completions_of_several_prompts_are_recorded_like_a_chat(
    serving: Serving, client: openai.OpenAI
) -> None:
    answer: Any = client.completions.create(
        model=BASE, prompt=["One", "Two"], n=2, max_tokens=3, logprobs=0
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    with sqlite3.connect(serving.state / "ledger.db") as ledger:
        for choice in answer.choices:
            prompt, completion = ledger.execute(
                "SELECT prompt_ids, completion_ids FROM completions WHERE choice_id = ?",
                (choice.choice_id,),
            ).fetchone()
            assert array("i", completion).tolist() == choice.token_ids
            assert array("i", prompt).tolist() == choice.prompt_token_ids
            assert len(choice.logprobs.token_logprobs) == len(choice.token_ids)
    assert answer.usage.completion_tokens == sum(len(c.token_ids) for c in answer.choices)
    recorded = httpx.get(f"{serving.openai}/rollouts/completions", timeout=60).json()
    messages = [completion["messages"][0]["content"] for completion in recorded["completions"]]
    assert messages == ["One", "Two"]
    ids = [choice["choice_id"] for choice in recorded["choices"]]
    assert ids == [choice.choice_id for choice in answer.choices]


def test_a_stream_has_the_same_text_and_tokens(client: openai.OpenAI) -> None:
    request: Any = {"model": BASE, "prompt": [1, 2, 3], "max_tokens": 6, "seed": 7, "logprobs": 0}
    whole: Any = client.completions.create(**request)
    chunks: list[Any] = list(
        client.completions.create(**request, stream=True, stream_options={"include_usage": True})
    )
    streamed = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.text for choice in streamed) == whole.choices[0].text
    assert [t for c in streamed for t in c.token_ids] == whole.choices[0].token_ids
    offsets = [offset for choice in streamed for offset in choice.logprobs.text_offset]
    assert offsets == whole.choices[0].logprobs.text_offset
    assert chunks[-1].usage == whole.usage


def test_an_echo_gives_the_prompt_the_logprobs_that_it_had_when_sampled(
    client: openai.OpenAI,
) -> None:
    sampled: Any = client.completions.create(model=BASE, prompt="Hello", max_tokens=4, logprobs=2)
    choice = sampled.choices[0]
    whole = choice.prompt_token_ids + choice.token_ids
    scored: Any = client.completions.create(
        model=BASE, prompt=[whole], max_tokens=0, echo=True, logprobs=2
    )
    echo = scored.choices[0]
    assert echo.token_ids == [] and echo.prompt_token_ids == whole
    assert echo.logprobs.token_logprobs[0] is None and echo.logprobs.top_logprobs[0] is None
    size = len(choice.token_ids)
    for key in ("token_logprobs", "tokens"):
        found, expected = (getattr(c.logprobs, key)[-size:] for c in (echo, choice))
        assert found == (pytest.approx(expected, abs=1e-3) if key == "token_logprobs" else expected)
    for tops, logprob in zip(
        echo.logprobs.top_logprobs[1:], echo.logprobs.token_logprobs[1:], strict=True
    ):
        assert max(tops.values()) >= logprob and len(tops) <= 3
    assert scored.usage.completion_tokens == 0


@pytest.mark.parametrize(
    ("fields", "name"),
    [({"suffix": "x"}, "`suffix`"), ({"best_of": 2}, "`best_of`"), ({"prompt": ""}, "`prompt`")],
)
def test_a_bad_request_is_answered_with_a_sentence(
    client: openai.OpenAI, fields: Any, name: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=name):
        client.completions.create(**{"model": BASE, "prompt": "x", **fields})
