"""The routes of Anthropic's Messages API."""

from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import Response

from kit.types import Json
from trainer.server.backend import Backend
from trainer.server.chat.exchange import Exchange
from trainer.server.json_routes import LargeJson, json_router
from trainer.server.messages.answer import MessageAnswer, events
from trainer.server.messages.request import CountRequest, MessagesRequest
from trainer.server.prompts import prepare
from trainer.server.streams import ClosingStream


def routes(backend: Backend) -> APIRouter:
    """The routes under `/v1`; under `/rollouts/ID/v1` the same ones also record a rollout."""
    router = json_router()

    @router.post("/v1/messages")
    async def create(body: MessagesRequest, request: Request) -> Response:
        body = body.continued(backend.threads)
        exchange = await Exchange.start(backend, request, body.as_chat())

        def stop_sequence(token_ids: list[int]) -> str | None:
            if not token_ids or token_ids[-1] in backend.workers.tokenizer.eos_ids:
                return None
            text = backend.workers.tokenizer.decode(token_ids)
            found = [(text.find(stop), stop) for stop in body.stops]
            return min(((place, stop) for place, stop in found if place >= 0), default=(0, None))[1]

        answer = MessageAnswer(body.model, stop_sequence)

        def finish() -> Json:
            """Keep the thread before the last event, so that a client may continue it."""
            usage = exchange.answer.usage()
            body.keep(backend.threads, answer.whole(usage))
            return usage

        if body.stream:
            chunks = exchange.chunks()
            stream = events(answer, chunks, exchange.prompt_tokens, finish)
            return ClosingStream(stream, chunks, exchange.deltas, headers=exchange.headers)
        list(answer.add(exchange.answer.whole()))
        list(answer.end())
        return LargeJson(answer.whole(finish()), headers=exchange.headers)

    @router.post("/v1/messages/count_tokens")
    async def count(body: CountRequest) -> Json:
        backend.models.find(body.model)
        chat, tokenizer = body.chat(), backend.workers.tokenizer
        read = partial(chat.sample_request, tokenizer, backend.encode)
        request, _ = await prepare(read, chat.messages, chat.tools)
        return {"input_tokens": len(request.prompt_ids)}

    return router
