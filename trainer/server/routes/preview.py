"""The API of `art.ServerlessBackend`, generation 3 of ART's clients, on both ports.

Ids are built from names, so that they survive a restart of the server: `PROJECT~NAME` for a model,
`PROJECT~NAME~STEP` for a training job, a number for an event.
"""

import re
from typing import Annotated, Literal

import pydantic
from fastapi import APIRouter, Depends, Query

from kit.errors import KitError
from kit.types import Json
from trainer.errors import BadRequest, Conflict, NotFound
from trainer.server import history
from trainer.server.backend import Backend
from trainer.server.json_routes import describe, json_router, large
from trainer.server.model import Model
from trainer.server.wire import (
    Groups,
    ModelWire,
    PlainName,
    StoredName,
    TrainRequest,
    without_nulls,
)

ENTITY = "art-cluster"  # the client requires one
PAGE = 100
_NUMBER = re.compile(r"[0-9]{1,9}")


class CreateModel(pydantic.BaseModel):
    name: StoredName
    project: StoredName
    base_model: str
    entity: PlainName | None = None
    return_existing: bool = False


class DeleteSteps(pydantic.BaseModel):
    steps: list[int]


class CreateJob(pydantic.BaseModel):
    model_id: str
    trajectory_groups: Groups
    experimental_config: Json | None = None
    digest: str


class LogGroups(pydantic.BaseModel):
    trajectory_groups: Groups
    split: PlainName = "val"


def routes(backend: Backend) -> APIRouter:
    router = json_router(prefix="/v1/preview")
    _add_models(router, backend)
    _add_checkpoints(router, backend)
    _add_jobs(router, backend)
    return router


def _add_models(router: APIRouter, backend: Backend) -> None:
    @router.post("/models")
    async def create(body: CreateModel) -> Json:
        # From openpipe-art 0.5.19 on this is the `run_name`; older clients have one name.
        wire = ModelWire(
            name=body.name, run_name=body.name, project=body.project, base_model=body.base_model
        )
        if not body.return_existing and backend.models.directory(wire).is_dir():
            raise Conflict(f"Model `{body.name}` exists already", hint="Send `return_existing`")
        # The client sends no request to prepare the model later, so it is served at once.
        await backend.prepare(wire)
        return {
            **{"id": f"{body.project}~{body.name}", "run_id": None},
            **{"entity": body.entity or ENTITY, "project": body.project},
            **{"name": body.name, "base_model": body.base_model},
        }

    @router.delete("/models/{model_id}")
    async def delete(model_id: str) -> None:
        await backend.storage.delete_model(_model(backend, model_id))

    @router.post("/models/{model_id}/log", openapi_extra=describe(LogGroups))
    async def log(model_id: str, body: Annotated[LogGroups, Depends(large(LogGroups))]) -> None:
        model = _model(backend, model_id)
        wire = ModelWire(name=model.name, project=model.project)
        await backend.log(wire, body.trajectory_groups, body.split)


def _add_checkpoints(router: APIRouter, backend: Backend) -> None:
    @router.get("/models/{model_id}/checkpoints")
    async def list_checkpoints(
        model_id: str,
        limit: Annotated[int, Query(ge=1)] = PAGE,
        order: Literal["asc", "desc"] = "asc",
        after: str | None = None,
    ) -> Json:
        model = _model(backend, model_id)
        metrics = history.by_step(model.directory)
        # A checkpoint that is written but not served yet is not listed.
        steps = sorted((s for s in model.steps if s <= model.step), reverse=order == "desc")
        entries = [
            {"id": f"step{step}", "step": step, "metrics": metrics.get(step, {})} for step in steps
        ]
        return _page(entries, after, limit)

    @router.delete("/models/{model_id}/checkpoints")
    async def delete_checkpoints(model_id: str, body: DeleteSteps) -> Json:
        model = _model(backend, model_id)
        if model.step in body.steps:
            raise Conflict(
                f"Step `{model.step}` is the newest of `{model.name}`",
                hint="Keep it, or delete the model",
            )
        missing = [step for step in body.steps if step not in model.steps]
        deleted = await backend.storage.keep(model, set(model.steps) - set(body.steps))
        return {"deleted_count": len(deleted), "not_found_steps": missing}


def _add_jobs(router: APIRouter, backend: Backend) -> None:
    @router.post("/training-jobs", openapi_extra=describe(CreateJob))
    async def create_job(body: Annotated[CreateJob, Depends(large(CreateJob))]) -> Json:
        model = _model(backend, body.model_id)
        wire = ModelWire(
            name=model.name, project=model.project, base_model=backend.models.base_model
        )
        request = TrainRequest(
            model=wire,
            trajectory_groups=body.trajectory_groups,
            dev_config=without_nulls(body.experimental_config),
            digest=body.digest,
        )
        training = await backend.train(request)
        return {"id": f"{body.model_id}~{training.request.step}"}

    @router.get("/training-jobs/{job_id}/events")
    async def events(
        job_id: str, after: str | None = None, limit: Annotated[int, Query(ge=1)] = PAGE
    ) -> Json:
        model_id, _, step = job_id.rpartition("~")
        model = _model(backend, model_id)
        if not _NUMBER.fullmatch(step):
            raise NotFound(f"There is no training job `{job_id}`", hint="Create one first")
        found = _events(backend, model, int(step))
        if after and _NUMBER.fullmatch(after) and int(after) >= len(found):
            # A second attempt at the step starts its events over, with the same content.
            return _page([], None, limit)
        page = _page(found, after, limit)
        if any(event["type"] == "training_ended" for event in page["data"]):
            model.journal.delivered(int(step))
        return page

    @router.post("/sft-training-jobs")
    async def sft(_: Json) -> None:
        raise BadRequest(
            "Supervised training through W&B artifacts is not supported",
            hint="Use `trainer.client.ArtBackend`, whose `_train_sft` sends the trajectories",
        )


def _events(backend: Backend, model: Model, step: int) -> list[Json]:
    """The events so far, of which the first holds the number of rows."""
    training = backend.admission.find(model, step)
    if training is None:
        if step > model.step:
            raise NotFound(
                f"Step `{step}` of `{model.name}` is not being trained", hint="Train it again"
            )
        kinds: list[tuple[str, Json]] = [
            ("training_started", {"num_sequences": 0}),
            ("training_ended", {}),
        ]
        return [_event(number, *kind) for number, kind in enumerate(kinds)]
    rows = list(training.rows_so_far)
    found: list[tuple[str, Json]] = []
    if rows or training.done:
        count = int(rows[0]["num_gradient_steps"]) if rows else 0
        found.append(("training_started", {"num_sequences": count}))
    for row in rows:
        found.append(("gradient_step", {k: row[k] for k in row if k != "num_gradient_steps"}))
    if training.done and training.error:
        found.append(("training_failed", {"error_message": _sentence(training.error)}))
    elif training.done:
        found.append(("training_ended", {}))
    return [_event(number, *kind) for number, kind in enumerate(found)]


def _event(number: int, kind: str, data: Json) -> Json:
    return {"id": str(number), "type": kind, "data": data}


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, KitError) else f"{type(error).__name__}: {error}"


def _page(entries: list[Json], after: str | None, limit: int) -> Json:
    """A page in OpenAI's cursor format: `after` is the id of the last entry of the page before."""
    if after is not None:
        ids = [entry["id"] for entry in entries]
        if after not in ids:
            raise NotFound(f"There is no entry `{after}`", hint="Start without `after`")
        entries = entries[ids.index(after) + 1 :]
    return {"object": "list", "data": entries[:limit], "has_more": len(entries) > limit}


def _model(backend: Backend, model_id: str) -> Model:
    project, _, name = model_id.partition("~")
    try:
        wire = ModelWire(name=name, project=project)
    except pydantic.ValidationError:
        raise NotFound(f"There is no model `{model_id}`", hint="Register it first") from None
    return backend.models.get(wire)
