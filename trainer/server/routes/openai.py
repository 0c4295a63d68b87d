"""The routes of the OpenAI-compatible API."""

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from kit.types import Json
from trainer.server.backend import Backend
from trainer.server.chat import ChatRequest
from trainer.server.chat_answer import ChatAnswer
from trainer.server.disconnects import ClosingStream, while_connected


def routes(backend: Backend) -> APIRouter:
    """The routes under `/v1`; under `/rollouts/ID/v1` the same ones also record a rollout."""
    router = APIRouter()

    @router.get("/v1/models")
    async def models() -> Json:
        return {"object": "list", "data": [_model(name) for name in backend.models.served_names()]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Json:
        backend.models.find(name)
        return _model(name)

    @router.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        backend.models.find(body.model)  # an unknown name is refused before any work
        rollout = request.path_params.get("rollout")
        sample_request = body.sample_request(backend.workers.tokenizer)
        answer = ChatAnswer(body, sample_request.prompt_ids)
        deltas = backend.sample(body.model, sample_request, rollout=rollout)

        def record() -> None:
            if rollout:
                backend.rollouts.record(rollout, answer.conversation())

        await while_connected(request, answer.read(deltas))
        if body.stream:
            # Recorded before the last event: a client that has read it may fetch the rollout.
            return ClosingStream(answer.events(deltas, record), deltas)
        record()
        return JSONResponse(answer.whole())

    return router


def _model(name: str) -> Json:
    return {"id": name, "object": "model", "created": 0, "owned_by": "art-cluster"}
