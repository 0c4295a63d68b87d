"""The routes of the OpenAI-compatible API."""

from fastapi import APIRouter, Request
from fastapi.responses import Response

from kit.types import Json
from trainer.server.backend import Backend
from trainer.server.chat.exchange import Exchange
from trainer.server.chat.request import ChatRequest
from trainer.server.json_routes import LargeJson, json_router
from trainer.server.streams import ClosingStream


def routes(backend: Backend) -> APIRouter:
    """The routes under `/v1`; under `/rollouts/ID/v1` the same ones also record a rollout."""
    router = json_router()

    @router.get("/v1/models")
    async def models() -> Json:
        return {"object": "list", "data": [_model(name) for name in backend.models.served_names()]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Json:
        backend.models.find(name)
        return _model(name)

    @router.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        exchange = await Exchange.start(backend, request, body)
        if body.stream:
            chunks = exchange.chunks()
            events = exchange.answer.events(chunks)
            return ClosingStream(events, chunks, exchange.deltas, headers=exchange.headers)
        return LargeJson(exchange.answer.whole(), headers=exchange.headers)

    return router


def _model(name: str) -> Json:
    return {"id": name, "object": "model", "created": 0, "owned_by": "art-cluster"}
