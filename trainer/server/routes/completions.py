"""The route of OpenAI's legacy completions."""

from contextlib import aclosing

from fastapi import APIRouter, Request
from fastapi.responses import Response

from kit.types import Json
from trainer.base_model.tokenizer import Tokenizer
from trainer.engines.engine import SampleRequest
from trainer.server.backend import Backend
from trainer.server.completions.answer import CompletionAnswer
from trainer.server.completions.merge import Merged, merge
from trainer.server.completions.request import CompletionRequest
from trainer.server.disconnects import while_connected
from trainer.server.json_routes import LargeJson, json_router
from trainer.server.prompts import prepare
from trainer.server.streams import ClosingStream


def routes(backend: Backend) -> APIRouter:
    """The routes under `/v1`; under `/rollouts/ID/v1` the same ones also record a rollout."""
    router = json_router()

    @router.post("/v1/completions")
    async def complete(body: CompletionRequest, request: Request) -> Response:
        backend.models.find(body.model)  # an unknown name is refused before any work
        tokenizer = backend.workers.tokenizer
        requests, answer = await prepare(lambda: _prepare(body, tokenizer), body.prompt)
        rollout = request.path_params.get("rollout")
        deltas = merge([backend.sample(body.model, each, rollout=rollout) for each in requests])

        def record(conversations: list[Json]) -> None:
            for conversation in conversations if rollout else ():
                backend.rollouts.record(str(rollout), conversation)

        if body.stream:
            first = await while_connected(request, _first(answer, deltas))
            return ClosingStream(answer.events(first, deltas, record), deltas)
        await while_connected(request, _all(answer, deltas))
        record(answer.conversations())
        return LargeJson(answer.whole())

    return router


def _prepare(
    body: CompletionRequest, tokenizer: Tokenizer
) -> tuple[list[SampleRequest], CompletionAnswer]:
    requests = body.sample_requests(tokenizer)
    return requests, CompletionAnswer(body, requests, tokenizer)


async def _first(answer: CompletionAnswer, deltas: Merged) -> Json:
    """The first chunk of a stream, so that errors come before its status."""
    return answer.chunk(*await anext(deltas))


async def _all(answer: CompletionAnswer, deltas: Merged) -> None:
    async with aclosing(deltas):
        async for number, step, delta in deltas:
            answer.add(number, step, delta)
