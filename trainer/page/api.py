"""The routes of the page: its files, and the typed JSON API that is its only source.

`trainer serve` and `trainer view` include the same routes. They read files and change nothing, so
they run in threads beside everything else.
"""

import json
from pathlib import Path
from typing import Annotated, Protocol

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from kit.types import Json
from trainer.errors import BadRequest, NotFound
from trainer.page import (
    answers,
    audit,
    compare,
    eval_answers,
    evals,
    examples,
    groups,
    overview,
    series,
)
from trainer.page.batches import TRAIN
from trainer.page.cache import Cache
from trainer.page.events import Events
from trainer.page.reader import Run, Runs
from trainer.page.routing import HEADERS, cached_by, error_answer, json_answer
from trainer.page.sessions import COOKIE, SESSION_SECONDS, Sessions

FILES = Path(__file__).parent / "files"
POLICY = "default-src 'self'; img-src 'self' data:; style-src 'self'; frame-ancestors 'none'"
Number = Annotated[int, Query(ge=0)]


class Live(Protocol):
    """What a server knows of its runs besides their files."""

    def state(self, project: str, name: str) -> overview.State | None:
        """What the run does now; None if the server has not loaded it."""

    def served(self, project: str, name: str) -> set[int]:
        """The steps that can be sampled from."""

    def lease(self) -> Json | None:
        """When the server exits, and what it costs."""


class Offline:
    """The runs of a directory that no server has open."""

    def state(self, project: str, name: str) -> overview.State | None:
        return None

    def served(self, project: str, name: str) -> set[int]:
        return set()

    def lease(self) -> Json | None:
        return None


def routes(
    runs: Runs,
    *,
    version: str,
    live: Live | None = None,
    sessions: Sessions | None = None,
    events: Events | None = None,
) -> APIRouter:
    """All routes over `runs`; `live` is there if a server has them open."""
    know: Live = live or Offline()
    router = APIRouter(route_class=cached_by(Cache(runs, know.state)))
    _add_files(router, sessions or Sessions())
    _add_runs(router, runs, know, version, is_live=live is not None)
    _add_steps(router, runs)
    _add_reports(router, runs, know)
    _add_evals(router, runs)
    _add_events(router, events or Events(runs))
    return router


def _add_files(router: APIRouter, sessions: Sessions) -> None:
    static = StaticFiles(directory=FILES, check_dir=False)

    @router.get("/", include_in_schema=False)
    async def index(request: Request, token: str | None = None) -> Response:
        if token is None:
            return await file("index.html", request)
        session = sessions.redeem(token)
        if session is None:
            return error_answer(
                401, "The link was used before, or is older than a minute", "Ask for another one"
            )
        answer = RedirectResponse("/", 303, headers=HEADERS)
        answer.set_cookie(
            COOKIE, session, max_age=SESSION_SECONDS, httponly=True, samesite="strict"
        )
        return answer

    @router.get("/files/{path:path}", include_in_schema=False)
    async def file(path: str, request: Request) -> Response:
        try:
            answer = await static.get_response(path, request.scope)
        except HTTPException as error:
            raise NotFound(f"There is no file `{path[:80]}`", hint="Open `/`") from error
        answer.headers.update({**HEADERS, "Content-Security-Policy": POLICY})
        return answer


def _add_runs(router: APIRouter, runs: Runs, know: Live, version: str, *, is_live: bool) -> None:
    @router.get("/api/runs", response_model=answers.RunList)
    def list_runs() -> Response:
        found = [
            overview.summary(run, live=know.state(run.project, run.name) is not None)
            for run in runs.all()
        ]
        server = {"version": version, "live": is_live, "lease": know.lease()}
        return json_answer(answers.RunList, {"runs": found, "server": server})

    @router.get("/api/runs/{project}/{name}", response_model=answers.Overview)
    def about(project: str, name: str) -> Response:
        state = know.state(project, name) or "ended"
        return json_answer(answers.Overview, overview.overview(runs.get(project, name), state))

    @router.get("/api/runs/{project}/{name}/series", response_model=answers.Series)
    def columns(
        project: str,
        name: str,
        names: str = "train/reward",
        since: Number = 0,
        points: Annotated[int, Query(ge=2, le=10_000)] = 1000,
    ) -> Response:
        wanted = list(dict.fromkeys(part for part in names.split(",") if part))
        found = series.series(runs.get(project, name), wanted, since=since, points=points)
        return json_answer(answers.Series, found)

    @router.get("/api/runs/{project}/{name}/steps", response_model=answers.Steps)
    def steps(
        project: str,
        name: str,
        since: Number = 0,
        limit: Annotated[int, Query(ge=1, le=100_000)] = 10_000,
    ) -> Response:
        return json_answer(
            answers.Steps, series.steps(runs.get(project, name), since=since, limit=limit)
        )


def _add_steps(router: APIRouter, runs: Runs) -> None:
    run = "/api/runs/{project}/{name}"

    @router.get(run + "/steps/{step}", response_model=answers.StepAnswer)
    def step(project: str, name: str, step: int, split: str = TRAIN) -> Response:
        return json_answer(answers.StepAnswer, groups.step(runs.get(project, name), step, split))

    @router.get(run + "/steps/{step}/groups/{id}", response_model=answers.GroupAttempts)
    def group(
        project: str,
        name: str,
        step: int,
        id: int,
        split: str = TRAIN,
        offset: Number = 0,
        limit: Annotated[int, Query(ge=1, le=256)] = 64,
    ) -> Response:
        found = groups.group(runs.get(project, name), step, id, split, offset=offset, limit=limit)
        return json_answer(answers.GroupAttempts, found)

    @router.get(run + "/attempts/{step}/{id}", response_model=answers.AttemptAnswer)
    def attempt(project: str, name: str, step: int, id: int, split: str = TRAIN) -> Response:
        found = groups.attempt(runs.get(project, name), step, id, split)
        return json_answer(answers.AttemptAnswer, found)

    @router.get(run + "/attempts/{step}/{id}/tokens", response_model=answers.Tokens)
    def tokens(
        project: str,
        name: str,
        step: int,
        id: int,
        split: str = TRAIN,
        offset: Number = 0,
        limit: Annotated[int, Query(ge=1, le=groups.MOST_TOKENS)] = 4000,
    ) -> Response:
        found = groups.tokens(runs.get(project, name), step, id, split, offset=offset, limit=limit)
        return json_answer(answers.Tokens, found)


def _add_reports(router: APIRouter, runs: Runs, know: Live) -> None:
    run = "/api/runs/{project}/{name}"

    @router.get(run + "/examples", response_model=answers.Examples)
    def list_examples(
        project: str,
        name: str,
        order: answers.Order = "spread",
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        offset: Number = 0,
        split: str = TRAIN,
    ) -> Response:
        found = examples.examples(
            runs.get(project, name), order=order, limit=limit, offset=offset, split=split
        )
        return json_answer(answers.Examples, found)

    @router.get(run + "/audit", response_model=answers.Audit)
    def signs(project: str, name: str) -> Response:
        return json_answer(answers.Audit, audit.audit(runs.get(project, name)))

    @router.get(run + "/compare", response_model=answers.Comparison)
    def comparison(project: str, name: str, a: str, b: str, other: str | None = None) -> Response:
        found = compare.compare(runs.get(project, name), a, b, _other(runs, other))
        return json_answer(answers.Comparison, found)

    @router.get(run + "/checkpoints", response_model=list[answers.CheckpointAnswer])
    def checkpoints(project: str, name: str) -> Response:
        found = overview.checkpoints(runs.get(project, name), know.served(project, name))
        rows = [answers.CheckpointAnswer.model_validate(row).model_dump() for row in found]
        return Response(json.dumps(rows), media_type="application/json", headers=HEADERS)

    @router.get(run + "/config")
    def config(project: str, name: str) -> Response:
        found = overview.config(runs.get(project, name))
        return Response(json.dumps(found), media_type="application/json", headers=HEADERS)

    @router.get(run + "/logs", response_model=answers.Log)
    def logs(project: str, name: str, tail: Annotated[int, Query(ge=1, le=5000)] = 200) -> Response:
        runs.get(project, name)
        return json_answer(answers.Log, {"lines": overview.logs(runs.root, tail)})


def _add_evals(router: APIRouter, runs: Runs) -> None:
    run = "/api/runs/{project}/{name}/evals"

    @router.get(run, response_model=eval_answers.Evals)
    def list_evals(project: str, name: str) -> Response:
        return json_answer(eval_answers.Evals, evals.evals(runs.get(project, name)))

    @router.get(run + "/{file}/examples", response_model=eval_answers.EvalExamples)
    def eval_examples(
        project: str,
        name: str,
        file: str,
        offset: Number = 0,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> Response:
        found = evals.eval_examples(runs.get(project, name), file, offset=offset, limit=limit)
        return json_answer(eval_answers.EvalExamples, found)

    @router.get(run + "/{file}/attempts", response_model=eval_answers.EvalAttempts)
    def eval_attempts(
        project: str,
        name: str,
        file: str,
        example: str,
        offset: Number = 0,
        limit: Annotated[int, Query(ge=1, le=256)] = 64,
    ) -> Response:
        found = evals.eval_attempts(
            runs.get(project, name), file, example, offset=offset, limit=limit
        )
        return json_answer(eval_answers.EvalAttempts, found)


def _other(runs: Runs, name: str | None) -> Run | None:
    if name is None:
        return None
    project, slash, run = name.partition("/")
    if not slash:
        raise BadRequest(f"`other` is `{name[:80]}`", hint="Use PROJECT/NAME")
    return runs.get(project, run)


def _add_events(router: APIRouter, events: Events) -> None:
    @router.get("/api/events")
    async def changes() -> Response:
        if events.full:
            return error_answer(429, "Too many pages are open", "Close one")
        return StreamingResponse(events.stream(), media_type="text/event-stream", headers=HEADERS)
