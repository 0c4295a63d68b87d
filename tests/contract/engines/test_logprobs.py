"""Logprobs are the policy's own, whatever shaped the choice."""

import asyncio
import json
from typing import Any

import pytest
import torch

from tests.contract.engines.choices import BOUND, PROMPT, sample
from trainer.base_model.resolve import resolve
from trainer.engines.engine import Constraint, Engine, SampleRequest
from trainer.engines.vllm_process import FLAT, VllmProcess
from trainer.policy.model import Policy, load_model

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_logprobs_are_the_policys_with_any_sampling_settings(engine: Engine) -> None:
    async def first_tokens(n: int, **settings: Any) -> dict[int, float]:
        choices = await sample(engine, n=n, seed=1, max_tokens=1, **settings)
        return {choice.token_ids[0]: choice.logprobs[0] for choice in choices}

    policy = await first_tokens(200)
    for settings in ({"temperature": 0.3}, {"temperature": 2.0}, {"top_p": 0.5}, {"top_k": 30}):
        drawn = await first_tokens(64, **settings)
        common = drawn.keys() & policy.keys()
        assert len(common) > 5
        assert all(abs(drawn[token] - policy[token]) < BOUND for token in common)


async def test_the_logprobs_are_the_policys_own_under_every_setting(
    engine: Engine, policy: Policy
) -> None:
    schema = json.dumps({"enum": ["one", "two", "three hundred"]})
    for settings in (
        {"logit_bias": ((65, 50.0),), "frequency_penalty": 2.0, "repetition_penalty": 3.0},
        {"min_p": 0.5, "temperature": 2.0},
        {"min_tokens": 10},
        {"constraint": Constraint("json_schema", schema)},
        {"constraint": Constraint("regex", "[ab]{4}(c|dd)"), "temperature": 0},
        {"constraint": Constraint("json_schema", schema), "stream": True, "n": 2},
    ):
        for choice in await sample(engine, seed=4, max_tokens=20, top_logprobs=3, **settings):
            assert len(choice.token_ids) == len(choice.logprobs) == len(choice.top_logprobs) > 0
            own = own_logprobs(policy, PROMPT, choice.token_ids)
            taken = own[range(len(own)), choice.token_ids].tolist()
            assert choice.logprobs == pytest.approx(taken, abs=BOUND)
            for found, row in zip(choice.top_logprobs, own, strict=True):
                values = row.topk(3).values.tolist()
                assert [value for _, value in found] == pytest.approx(values, abs=BOUND)
                assert [float(row[token]) for token, _ in found] == pytest.approx(values, abs=BOUND)


async def test_requests_that_want_different_logprobs_share_steps(
    engine: Engine, policy: Policy
) -> None:
    wanted = (0, 5, 0, 2)
    settings = {"max_tokens": 90, "ignore_eos": True, "n": 2}  # longer than what vLLM holds back
    for found in await asyncio.gather(
        *(sample(engine, seed=n, top_logprobs=top, **settings) for n, top in enumerate(wanted)),
        *(sample(engine, seed=9, top_logprobs=3, stream=True, **settings) for _ in range(2)),
    ):
        for choice in found:
            own = own_logprobs(policy, PROMPT, choice.token_ids)
            taken = own[range(90), choice.token_ids].tolist()
            assert choice.logprobs == pytest.approx(taken, abs=BOUND)


@pytest.mark.parametrize("settings", [{}, {"stop": ("a",)}, {"n": 3}, {"stop_token_ids": (97,)}])
async def test_vllms_short_route_answers_what_its_own_route_does(
    engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    paths = []
    post = VllmProcess.post

    async def listen(self: VllmProcess, path: str, body: Any) -> Any:
        paths.append(path)
        return await post(self, path, body)

    monkeypatch.setattr(VllmProcess, "post", listen)
    short = await sample(engines["vllm"], seed=5, max_tokens=40, **settings)
    assert paths == [FLAT]
    own = await sample(engines["vllm"], seed=5, max_tokens=40, top_logprobs=1, **settings)
    assert paths == [FLAT, "/v1/completions"]
    for one, other in zip(short, own, strict=True):
        assert (one.token_ids, one.text) == (other.token_ids, other.text)
        assert one.finish_reason == other.finish_reason
        assert one.logprobs == pytest.approx(other.logprobs, abs=BOUND)


@pytest.fixture(scope="module")
def policy() -> Policy:
    cpu = torch.device("cpu")
    return load_model(resolve("tiny-random"), lora=None, dtype=torch.float32, device=cpu)


@torch.no_grad()
def own_logprobs(policy: Policy, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Return all logprobs [T, V] at the places of `tokens`, by the forward pass of training."""
    hidden = policy.hidden(torch.tensor([[*prompt, *tokens]]))
    return policy.logits(hidden)[0, len(prompt) - 1 : -1].float().log_softmax(dim=-1)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_logprobs_of_a_prompt_come_with_its_first_delta(
    engine: Engine, policy: Policy, stream: bool
) -> None:
    own = own_logprobs(policy, PROMPT[:1], PROMPT[1:])
    for settings in ({"max_tokens": 0}, {"max_tokens": 3}, {"max_tokens": 3, "top_logprobs": 2}):
        request = SampleRequest(PROMPT, n=2, prompt_logprobs=True, stream=stream, **settings)
        deltas = [delta async for delta in engine.sample(request)]
        for index in range(2):
            first, *later = [delta for delta in deltas if delta.index == index]
            assert first.prompt_logprobs is not None and first.prompt_logprobs[0] is None
            assert first.prompt_logprobs[1:] == pytest.approx(
                own[range(len(own)), PROMPT[1:]].tolist(), abs=BOUND
            )
            assert all(delta.prompt_logprobs is None for delta in later)
            assert len(first.prompt_top_logprobs) == (
                len(PROMPT) if "top_logprobs" in settings else 0
            )
            for found, row in zip(first.prompt_top_logprobs[1:], own, strict=False):
                assert [value for _, value in found] == pytest.approx(
                    row.topk(2).values.tolist(), abs=BOUND
                )
            tokens = [token for delta in (first, *later) for token in delta.token_ids]
            assert len(tokens) <= settings["max_tokens"]
