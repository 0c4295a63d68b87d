"""The routes of OpenAI's Responses API."""

from fastapi import APIRouter, Request
from fastapi.responses import Response

from kit.types import Json
from trainer.server.backend import Backend
from trainer.server.chat.exchange import Exchange
from trainer.server.json_routes import LargeJson, json_router
from trainer.server.responses.answer import ResponseAnswer, events
from trainer.server.responses.request import ResponsesRequest
from trainer.server.streams import ClosingStream


def routes(backend: Backend) -> APIRouter:
    """The routes under `/v1`; under `/rollouts/ID/v1` the same ones also record a rollout."""
    router = json_router()
    stored = backend.responses

    @router.post("/v1/responses")
    async def create(body: ResponsesRequest, request: Request) -> Response:
        previous = body.previous_response_id
        messages = stored.messages(previous) if previous else []
        messages += body.new_messages(stored.item)
        exchange = await Exchange.start(backend, request, body.chat(messages))
        answer = ResponseAnswer(body)

        def finish() -> Json:
            """Store the response before its last event, so that a client may continue it."""
            usage = exchange.answer.usage()
            if body.store is not False:
                said = exchange.answer.conversation()["choices"][0]["message"]
                stored.put(answer.whole(usage), [*messages, said])
            return usage

        if body.stream:
            chunks = exchange.chunks()
            stream = events(answer, chunks, finish)
            return ClosingStream(stream, chunks, exchange.deltas, headers=exchange.headers)
        list(answer.add(exchange.answer.whole()))
        list(answer.end())
        return LargeJson(answer.whole(finish()), headers=exchange.headers)

    @router.get("/v1/responses/{response_id}")
    async def read(response_id: str) -> Json:
        return stored.get(response_id)

    @router.delete("/v1/responses/{response_id}")
    async def delete(response_id: str) -> Json:
        stored.delete(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    return router
