"""ART's control API for its clients of generations 1 and 2."""

import json
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from kit.types import Json
from trainer import checkpoint, faults
from trainer.errors import Unsupported
from trainer.server import history
from trainer.server.backend import Backend
from trainer.server.client_settings import inference_key
from trainer.server.json_routes import describe, json_router, large
from trainer.server.model import Model
from trainer.server.storage import LEASE_SECONDS
from trainer.server.streams import ClosingStream
from trainer.server.training import Training
from trainer.server.wire import (
    DeployRequest,
    ForkRequest,
    KeepRequest,
    LeaseRequest,
    LogRequest,
    ModelWire,
    PrepareRequest,
    S3Request,
    SftRequest,
    TrainRequest,
)

logger = logging.getLogger(__name__)


def routes(backend: Backend) -> APIRouter:
    router = json_router()

    @router.post("/register")
    async def register(model: ModelWire) -> None:
        await backend.register(model)

    @router.post("/_prepare_backend_for_training")
    async def prepare(body: PrepareRequest, request: Request) -> tuple[str, str]:
        key = inference_key(body.config, backend.config, backend.openai_port)
        await backend.prepare(body.model)
        # The host by which the client reached this server; only the port differs.
        host = request.url.hostname or "127.0.0.1"
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{backend.openai_port}/v1", key

    @router.post("/_get_step")
    async def get_step(model: ModelWire) -> int:
        return backend.models.ready(model).step

    @router.post("/_train_model", openapi_extra=describe(TrainRequest))
    async def train_model(
        body: Annotated[TrainRequest, Depends(large(TrainRequest))],
        parent_step: Annotated[int | None, Query(ge=0)] = None,
    ) -> Response:
        return await stream(await backend.train(body, parent_step), verbose=body.verbose)

    @router.post("/_train_sft", openapi_extra=describe(SftRequest))
    async def train_sft(
        body: Annotated[SftRequest, Depends(large(SftRequest))],
    ) -> Response:
        return await stream(await backend.train(body.as_step()), verbose=body.verbose)

    @router.post("/_log", openapi_extra=describe(LogRequest))
    async def log(body: Annotated[LogRequest, Depends(large(LogRequest))]) -> None:
        await backend.log(body.model, body.trajectory_groups, body.split)

    @router.post("/_delete_checkpoints")
    async def delete_checkpoints(
        model: ModelWire, benchmark: str = "val/reward", benchmark_smoothing: float = 1.0
    ) -> None:
        found = backend.models.get(model)
        values = history.smoothed(found.directory, benchmark, benchmark_smoothing)
        steps = checkpoint.steps_to_keep(found.steps, last=1, metrics=values, best=1)
        await backend.storage.keep(found, steps)

    @router.post("/_delete_checkpoint_files")
    async def delete_checkpoint_files(body: KeepRequest) -> None:
        await backend.storage.keep(backend.models.get(body.model), body.steps_to_keep)

    @router.post("/_lease_checkpoint")
    async def lease_checkpoint(body: LeaseRequest) -> Json:
        id = body.id or secrets.token_hex(8)
        backend.storage.lease(backend.models.get(body.model), body.step, id)
        return {"id": id, "seconds": LEASE_SECONDS}

    @router.post("/_release_checkpoint")
    async def release_checkpoint(body: LeaseRequest) -> None:
        backend.models.get(body.model).leases.pop(body.id or "", None)

    @router.post("/close")
    async def close() -> None:
        """Do nothing: other clients may still need the server, which stops by signal or lease."""

    _add_experimental(router, backend)
    return router


def _add_experimental(router: APIRouter, backend: Backend) -> None:
    @router.post("/_experimental_fork_checkpoint")
    async def fork(body: ForkRequest) -> None:
        await backend.prepare(body.model)
        await backend.storage.fork(backend.models.get(body.model), body)

    async def registered(wire: ModelWire) -> Model:
        await backend.register(wire)  # ART's scripts pull before they register
        return backend.models.get(wire)

    @router.post("/_experimental_push_to_s3")
    async def push(body: S3Request) -> None:
        await backend.storage.push(await registered(body.model), body)

    @router.post("/_experimental_pull_from_s3")
    async def pull(body: S3Request) -> None:
        await backend.storage.pull(await registered(body.model), body)

    @router.post("/_experimental_deploy")
    async def deploy(body: DeployRequest) -> None:
        raise Unsupported(
            f"Deployment to `{body.deploy_to}` is not supported",
            hint="Export the checkpoint with `trainer export`, and serve it anywhere",
        )


async def stream(training: Training, *, verbose: bool) -> Response:
    """Stream the rows of a step. The status waits for the first, so that a bad group is a 4xx."""
    rows = _logged(training) if verbose else training.rows()
    first = await anext(rows, None)
    return ClosingStream(_ndjson(first, rows, training), media_type="application/x-ndjson")


async def _logged(training: Training) -> AsyncIterator[Json]:
    """Log every row too, for `verbose`."""
    async for row in training.rows():
        metrics = " ".join(f"{name}={value:.4g}" for name, value in sorted(row.items()))
        logger.info("%s: %s", training.model.key, metrics)
        yield row


async def _ndjson(
    first: Json | None, rows: AsyncIterator[Json], training: Training
) -> AsyncGenerator[str, None]:
    """One object per line and no empty line: clients of generation 1 parse every line."""
    if first is not None:
        yield json.dumps(first) + "\n"
    async for row in rows:
        yield json.dumps(row) + "\n"
    faults.reached("server-streamed")
    training.model.journal.delivered(training.request.step)
