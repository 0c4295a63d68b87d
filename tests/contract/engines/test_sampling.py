"""Sampling settings act alike in every engine."""

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from tests.contract.engines.choices import BOUND, PROMPT, PROMPTS, differences, sample
from trainer.engines.engine import Constraint, Delta, Engine, SampleRequest
from trainer.engines.vllm import VllmEngine
from trainer.errors import BadRequest

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
async def test_both_engines_give_the_same_greedy_tokens_and_logprobs(
    engines: dict[str, Engine], prompt: list[int]
) -> None:
    request = {"prompt_ids": prompt, "temperature": 0, "max_tokens": 24}
    (ours,), (theirs,) = [await sample(engine, **request) for engine in engines.values()]
    assert ours.token_ids == theirs.token_ids
    assert ours.text == theirs.text and ours.finish_reason == theirs.finish_reason
    assert max(differences(ours, theirs)) < BOUND


async def test_the_same_seed_repeats_and_another_does_not(engine: Engine) -> None:
    runs = [await sample(engine, seed=seed, max_tokens=16, n=3) for seed in (5, 5, 6)]
    tokens = [[choice.token_ids for choice in run] for run in runs]
    assert tokens[0] == tokens[1] != tokens[2]
    assert len({tuple(ids) for ids in tokens[0]}) == 3


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
async def test_a_stream_adds_up_to_the_whole_completion(engine: Engine, temperature: float) -> None:
    request = {"temperature": temperature, "seed": 3, "max_tokens": 12, "n": 2}
    whole = await sample(engine, **request)
    pieces = [
        delta
        async for delta in engine.sample(SampleRequest(prompt_ids=PROMPT, stream=True, **request))
    ]
    assert len(pieces) > len(whole) == 2
    streamed = [Delta(0), Delta(1)]
    for piece in pieces:
        streamed[piece.index].extend(piece)
    for one, other in zip(whole, streamed, strict=True):
        assert one.token_ids == other.token_ids and one.text == other.text
        assert one.finish_reason == other.finish_reason
        assert max(differences(one, other)) < BOUND


async def test_top_k_of_one_and_a_tiny_top_p_are_greedy(engine: Engine) -> None:
    (greedy,) = await sample(engine, temperature=0, max_tokens=6)
    for settings in ({"top_k": 1}, {"top_p": 1e-6}):
        (drawn,) = await sample(engine, max_tokens=6, seed=1, **settings)
        assert drawn.token_ids == greedy.token_ids


async def test_penalties_bias_and_min_p_act_alike_in_both_engines(
    engines: dict[str, Engine],
) -> None:
    (plain,) = await sample(engines["embedded"], temperature=0, max_tokens=24)
    for settings in (
        {"frequency_penalty": 1.5},
        {"presence_penalty": 2.0},
        {"repetition_penalty": 1.8},
        {"logit_bias": ((plain.token_ids[0], -100.0), (65, 3.0))},
        {"frequency_penalty": -0.5, "repetition_penalty": 0.7, "presence_penalty": 1.0},
    ):
        request = {"temperature": 0, "max_tokens": 24, **settings}
        (ours,), (theirs,) = [await sample(engine, **request) for engine in engines.values()]
        assert ours.token_ids == theirs.token_ids != plain.token_ids
        assert max(differences(ours, theirs)) < BOUND


async def test_min_p_of_one_is_greedy(engine: Engine) -> None:
    (greedy,) = await sample(engine, temperature=0, max_tokens=6)
    (drawn,) = await sample(engine, min_p=1.0, max_tokens=6, seed=1)
    assert drawn.token_ids == greedy.token_ids


@pytest.mark.parametrize(
    "settings",
    [
        {"min_p": 1.5},
        {"frequency_penalty": 3.0},
        {"presence_penalty": -3.0},
        {"repetition_penalty": 0.0},
        {"top_logprobs": 21},
        {"logit_bias": ((9999, 1.0),)},
        {"logit_bias": ((7, 101.0),)},
        {"stop_token_ids": (9999,)},
        {"min_tokens": 9},
        {"max_tokens": 0},
        {"ignore_eos": True, "constraint": Constraint("json_object")},
        {"min_tokens": 2, "constraint": Constraint("json_object")},
    ],
    ids=lambda settings: "-".join(settings),
)
async def test_a_setting_out_of_range_is_rejected_by_name(
    engine: Engine, settings: dict[str, Any]
) -> None:
    with pytest.raises(BadRequest, match=f"`{next(iter(settings))}`"):
        await sample(engine, **{"max_tokens": 8, **settings})


async def test_concurrent_requests_give_the_same_as_each_alone(engine: Engine) -> None:
    requests = [
        {"prompt_ids": PROMPTS[i % 4], "seed": i, "max_tokens": 6 + i, "temperature": 0.9}
        for i in range(12)
    ]
    together = await asyncio.gather(*(sample(engine, **request) for request in requests))
    for request, (choice,) in zip(requests[::4], together[::4], strict=True):
        (alone,) = await sample(engine, **request)
        assert alone.token_ids == choice.token_ids
        assert max(differences(alone, choice)) < BOUND


async def test_closing_a_request_early_cancels_it(engine: Engine) -> None:
    request = SampleRequest(prompt_ids=PROMPT, n=16, max_tokens=1500, stream=True)
    async with aclosing(engine.sample(request)) as deltas:  # type: ignore[type-var]
        async for _ in deltas:
            break
    task = asyncio.create_task(sample(engine, n=64, max_tokens=1500))
    await asyncio.sleep(0.02)  # started, and far from its end: a random model stops by chance
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await idle(engine)


async def idle(engine: Engine) -> bool:
    """Return whether nothing is being sampled: by vLLM's metrics, or by a quick reply."""
    if not isinstance(engine, VllmEngine):
        return bool(await sample(engine, max_tokens=1))
    for _ in range(600):
        metrics = (await engine._process._client.request("GET", "/metrics")).text
        running = [line for line in metrics.splitlines() if "num_requests_running{" in line]
        if running and all(line.endswith(" 0.0") for line in running):
            return True
        await asyncio.sleep(0.1)
    return False
