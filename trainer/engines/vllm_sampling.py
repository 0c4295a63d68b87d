"""Samples a request with a running vLLM, and asks it for the policy's own logprobs."""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from kit.types import Json
from trainer.base_model.tokenizer import Tokenizer
from trainer.engines.engine import Delta, SampleRequest, TopLogprobs
from trainer.engines.vllm_choice import VllmChoice
from trainer.engines.vllm_process import FLAT, VllmProcess
from trainer.engines.vllm_requests import sampling_body, scores, scoring_body
from trainer.errors import TrainerError

logger = logging.getLogger(__name__)
# Two prompts longer than the largest CUDA graph, and two shorter ones, whose kernels differ and are
# compiled with the graphs unless a user captures none. Of each two, one is a multiple of 16: Triton
# compiles a kernel once for those, and once for other numbers.
WARM_UP = (3072, 3057, 512, 501)


async def warm_up(process: VllmProcess, *, model: str, context: int) -> None:
    """Make vLLM compile what it otherwise compiles while the first requests with a LoRA wait."""
    longest = (context - 2) // 16 * 16
    for token, wanted in enumerate(WARM_UP):  # not the same tokens, which would be cached
        # A multiple of 16 or not, as wanted, however short the context is.
        length = min(wanted, longest - (-wanted) % 16)
        body = {
            **{"model": model, "prompt": [token] * length, "max_tokens": 2},
            **{"logprobs": 0, "ignore_eos": True, "stream": False},
        }
        try:
            await process.post("/v1/completions", body)
        except TrainerError as error:
            logger.warning("vLLM could not be warmed up: %s", error.message)


class VllmSampler:
    """Samples from `model`, vLLM's name of a LoRA or of the base model."""

    def __init__(
        self, process: VllmProcess, tokenizer: Tokenizer, *, model: str, context: int
    ) -> None:
        self._process = process
        self._tokenizer = tokenizer
        self._model = model
        self._context = context

    async def sample(self, request: SampleRequest, limit: int) -> AsyncGenerator[Delta, None]:
        """Yield deltas until all choices have finished, each after `limit` tokens at most."""
        prompt: Json = {}
        if request.prompt_logprobs:
            scored = await self._score(request.prompt_ids, request.top_logprobs)
            prompt = dict(zip(("prompt_logprobs", "prompt_top_logprobs"), scored, strict=True))
        if not limit:
            for index in range(request.n):
                yield Delta(index, finish_reason="length", **prompt)
            return
        began: set[int] = set()
        # vLLM rejects several greedy choices; sample one and copy it.
        copies = request.n if request.temperature == 0 else 1
        async with aclosing(self._choices(request, request.n // copies, limit)) as deltas:
            async for delta in deltas:
                if delta.index not in began:
                    began.add(delta.index)
                    delta = dataclasses.replace(delta, **prompt)
                for copy in range(copies):
                    yield dataclasses.replace(delta, index=delta.index + copy)

    async def _choices(
        self, request: SampleRequest, n: int, limit: int
    ) -> AsyncGenerator[Delta, None]:
        ends = {*request.stop_token_ids, *(() if request.ignore_eos else self._tokenizer.eos_ids)}
        if request.constraint and len(request.prompt_ids) + limit == self._context:
            limit = max(limit - 1, 1)  # the request for the logprobs samples one more
        choices = [VllmChoice(index, request, self._tokenizer, ends) for index in range(n)]
        body = sampling_body(request, model=self._model, n=n, limit=limit, ends=ends)
        constrained: list[Delta] = []
        async with aclosing(self._rows(body)) as rows:
            async for row in rows:
                delta = choices[row["index"]].take(row)
                if delta and delta.finish_reason and request.constraint:
                    constrained.append(delta)
                elif delta:
                    yield delta
                if row["finish_reason"] is None and all(choice.finished for choice in choices):
                    break  # at a stop string that vLLM did not detect
        for delta in await asyncio.gather(*(self._scored(request, each) for each in constrained)):
            yield delta

    async def _rows(self, body: Json) -> AsyncGenerator[Json, None]:
        """Yield the choices of vLLM's response. Closing the iterator early cancels it."""
        if not body["stream"]:
            flat = self._process.flat and not body["logprobs"]
            path = FLAT if flat else "/v1/completions"
            for choice in (await self._process.post(path, body))["choices"]:
                yield choice
            return
        async with aclosing(self._process.stream("/v1/completions", body)) as events:
            async for event in events:
                for choice in event["choices"]:
                    yield choice

    async def _scored(self, request: SampleRequest, delta: Delta) -> Delta:
        """Add the policy's own logprobs to a constrained choice, as the learner computes them."""
        before = len(request.prompt_ids)
        tokens = [*request.prompt_ids, *delta.token_ids]
        logprobs, likely = await self._score(tokens, request.top_logprobs)
        delta.logprobs = [value for value in logprobs[before:] if value is not None]
        delta.top_logprobs = likely[before:]
        return delta

    async def _score(self, tokens: list[int], top: int) -> tuple[list[float | None], TopLogprobs]:
        body = scoring_body(tokens, model=self._model, top=top)
        return scores(await self._process.post("/v1/completions", body), tokens, top)
