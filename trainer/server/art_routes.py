"""ART's control API, as the clients of its generations 1 and 2 speak it."""

import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse

from trainer import faults
from trainer.errors import Unsupported
from trainer.server.backend import Backend
from trainer.server.training import Training
from trainer.server.wire import ModelWire, PrepareRequest, TrainRequest

Json = dict[str, Any]


def routes(backend: Backend) -> APIRouter:
    router = APIRouter()

    @router.post("/register")
    async def register(model: ModelWire) -> None:
        backend.register(model)

    @router.post("/_prepare_backend_for_training")
    async def prepare(body: PrepareRequest, request: Request) -> tuple[str, str]:
        if body.config:
            names = ", ".join(f"`config.{name}`" for name in body.config)
            raise Unsupported(f"This server is configured at its start, not by {names}")
        await backend.prepare(body.model)
        # The client reaches us by this name; only the port differs.
        host = request.url.hostname or "127.0.0.1"
        return f"http://{host}:{backend.openai_port}/v1", "default"

    @router.post("/_get_step")
    async def get_step(model: ModelWire) -> int:
        return backend.models.get(model).step

    @router.post("/_train_model")
    async def train_model(body: TrainRequest) -> StreamingResponse:
        training = backend.train(body)
        rows = training.rows()
        # The first row is awaited before the status goes out, so that a bad group is a 4xx.
        first = await anext(rows, None)
        return StreamingResponse(_ndjson(first, rows, training), media_type="application/x-ndjson")

    return router


async def _ndjson(
    first: Json | None, rows: AsyncIterator[Json], training: Training
) -> AsyncIterator[str]:
    """One object a line, never an empty line: generation 1 parses every one."""
    if first is not None:
        yield json.dumps(first) + "\n"
    async for row in rows:
        yield json.dumps(row) + "\n"
    faults.reached("server-streamed")
    training.model.journal.delivered()
