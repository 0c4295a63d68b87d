"""The translation of OpenAI's legacy completions: prompts, and lists of logprobs."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from trainer.base_model import tiny_random
from trainer.base_model.tokenizer import Tokenizer
from trainer.engines.engine import Delta
from trainer.errors import BadRequest, Unsupported
from trainer.server.completions.answer import CompletionAnswer
from trainer.server.completions.merge import merge
from trainer.server.completions.request import CompletionRequest


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tiny")
    tiny_random.write(directory)
    return Tokenizer(directory)


def body(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"model": "m", "prompt": "hi", **fields})


@pytest.mark.parametrize("kind", ["text", "tokens", "texts", "lists"])
def test_prompts_are_texts_or_tokens_one_or_several(kind: str, tokenizer: Tokenizer) -> None:
    hi, yo = tokenizer.encode("hi"), tokenizer.encode("yo")
    given = {"text": "hi", "tokens": hi, "texts": ["hi", "yo"], "lists": [hi, yo]}[kind]
    requests = body(prompt=given).sample_requests(tokenizer)
    expected = [hi] if kind in ("text", "tokens") else [hi, yo]
    assert [request.prompt_ids for request in requests] == expected
    assert {request.max_tokens for request in requests} == {16}


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"suffix": "end"}, Unsupported, "`suffix`"),
        ({"best_of": 3}, Unsupported, "`best_of`"),
        ({"nonsense": 1}, Unsupported, "`nonsense`"),
        ({"max_tokens": 0}, BadRequest, "`echo`"),
        ({"prompt": ""}, BadRequest, "`prompt` is empty"),
        ({"prompt": []}, BadRequest, "`prompt` is empty"),
        ({"prompt": ["hi", ""]}, BadRequest, "`prompt` is empty"),
        ({"prompt": [10**6]}, BadRequest, "`1000000`"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(
    fields: Any, error: type[Exception], message: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(error, match=message):
        body(**fields).sample_requests(tokenizer)


def test_an_echo_has_logprobs_of_the_prompt_and_of_the_completion(tokenizer: Tokenizer) -> None:
    request = body(prompt="é!", echo=True, logprobs=1, max_tokens=2)
    samples = request.sample_requests(tokenizer)
    assert samples[0].prompt_logprobs and samples[0].top_logprobs == 1
    a, b = tokenizer.encode("ab")
    prompt_ids = samples[0].prompt_ids
    assert len(prompt_ids) == 3  # é is two tokens here
    delta = Delta(
        0,
        token_ids=[a, b],
        logprobs=[-1.0, -2.0],
        text="ab",
        finish_reason="length",
        top_logprobs=[[(a, -1.0)], [(a, -0.5)]],
        prompt_logprobs=[None, -3.0, -4.0],
        prompt_top_logprobs=[[], [(prompt_ids[1], -3.0)], [(a, -0.25)]],
    )
    answer = CompletionAnswer(request, samples, tokenizer)
    answer.add(0, 7, delta)
    whole = answer.whole()
    choice = whole["choices"][0]
    assert whole["policy_step"] == 7 and choice["text"] == "é!ab"
    assert choice["prompt_token_ids"] == prompt_ids and choice["token_ids"] == [a, b]
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == [None, -3.0, -4.0, -1.0, -2.0]
    assert logprobs["tokens"][2:] == ["!", "a", "b"]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][2:] == [
        {"a": -0.25, "!": -4.0},
        {"a": -1.0},
        {"a": -0.5, "b": -2.0},
    ]
    assert logprobs["text_offset"] == [0, 0, 1, 2, 3]
    assert whole["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    recorded = answer.conversations()[0]
    assert recorded["messages"] == [{"role": "user", "content": "é!"}]
    assert recorded["choices"][0]["message"]["content"] == "ab"


def test_the_chunks_of_a_stream_add_up_to_the_whole(tokenizer: Tokenizer) -> None:
    request = body(prompt=["hi", "yo"], n=2, echo=True, logprobs=0, stream=True)
    ids = tokenizer.encode("abcd")
    deltas = [
        (number, Delta(index, token_ids=[ids[place]], logprobs=[-1.0 * place], text="abcd"[place]))
        for place in range(4)
        for number in range(2)
        for index in range(2)
    ]
    samples = request.sample_requests(tokenizer)
    streamed, whole = (CompletionAnswer(request, samples, tokenizer) for _ in range(2))
    chunks = [streamed.chunk(number, 0, delta)["choices"][0] for number, delta in deltas]
    for number, delta in deltas:
        whole.add(number, 0, delta)
    for choice in whole.whole()["choices"]:
        parts = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for key, value in choice["logprobs"].items():
            assert [each for part in parts for each in part["logprobs"][key]] == value
    assert [choice["text"] for choice in whole.whole()["choices"]] == [
        *("hiabcd", "hiabcd", "yoabcd", "yoabcd"),
    ]


def test_every_chunk_has_the_usage_so_far_if_requested(tokenizer: Tokenizer) -> None:
    request = body(prompt="hi", stream=True, stream_options={"continuous_usage_stats": True})
    answer = CompletionAnswer(request, request.sample_requests(tokenizer), tokenizer)
    deltas = [Delta(0, token_ids=[token], logprobs=[-1.0]) for token in tokenizer.encode("ab")]
    chunks = [answer.chunk(0, 0, delta) for delta in deltas]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2]


async def test_prompts_are_sampled_at_once_and_the_first_fault_ends_all() -> None:
    ended = []
    both = asyncio.Barrier(2)

    async def source(number: int, fails: bool) -> AsyncGenerator[tuple[int, Delta], None]:
        try:
            await both.wait()  # neither goes on before the other has started
            yield 0, Delta(number)
            if fails:
                raise BadRequest("No")
            await asyncio.sleep(3600)
        finally:
            ended.append(number)

    with pytest.raises(BadRequest, match="No"):
        async for number, _, delta in merge([source(0, False), source(1, True)]):
            assert number == delta.index
    assert sorted(ended) == [0, 1]
