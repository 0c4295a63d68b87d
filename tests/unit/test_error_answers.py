"""What a client reads when a request fails, on an app without workers."""

import asyncio
import logging
from collections.abc import AsyncIterator

import httpx
import pytest

from trainer.config import ServerConfig
from trainer.errors import Diverged
from trainer.server.app import ExpectedErrors, create_app
from trainer.server.backend import Backend

PAGE = "`docs/api.md` lists what is served"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def apps(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, httpx.ASGITransport]:
    """The app without and with `cors`."""
    found = {}
    for cors in (False, True):
        config = ServerConfig(state_dir=str(tmp_path_factory.mktemp("state")), cors=cors)
        backend = Backend(config, openai_port=8000)
        found[cors] = httpx.ASGITransport(create_app(config, backend))
    return found


def client(app: httpx.ASGITransport) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=app, base_url="http://127.0.0.1")


@pytest.fixture
async def server(apps: dict[bool, httpx.ASGITransport]) -> AsyncIterator[httpx.AsyncClient]:
    async with client(apps[False]) as connected:
        yield connected


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v1/embeddings", "another provider"),
        ("/v1/audio/speech", "Only text"),
        ("/v1/images/generations", "Only text"),
        ("/v1/assistants", "`/v1/chat/completions`"),
        ("/v1/threads/t/runs", "`/v1/chat/completions`"),
        ("/v1/files", "stored"),
        ("/v1/moderations", "Moderate"),
        ("/v1/fine_tuning/jobs", "ART client"),
        ("/rollouts/r/v1/embeddings", "another provider"),
        ("/v1/responses/resp_1/cancel", "`GET /v1/responses/ID`"),
        ("/v1/messages/batches/b/cancel", "concurrently"),
        ("/chat/completions", "must end with `/v1`"),
        ("/v1/v1/chat/completions", "twice"),
        ("/openai/deployments/m/chat/completions", "Azure"),
        ("/api/chat", "Ollama"),
        ("/nowhere", PAGE),
    ],
)
async def test_a_route_that_is_not_served_names_the_alternative(
    server: httpx.AsyncClient, path: str, hint: str
) -> None:
    answer = await server.post(path, json={})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (404, "not_found_error")
    assert hint in error["hint"] and PAGE in error["hint"] and path in error["message"]


async def test_an_invalid_field_is_named_as_openai_names_it(server: httpx.AsyncClient) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "top_logprobs": 99}
    answer = await server.post("/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert (error["param"], error["code"]) == ("top_logprobs", "invalid_value")
    assert "`top_logprobs`" in error["message"]


@pytest.mark.parametrize(
    ("path", "status", "kind", "code"),
    [
        ("/v1/models/none", 404, "not_found_error", "model_not_found"),
        ("/v1/chat/completions", 405, "invalid_request_error", None),
    ],
)
async def test_the_type_of_an_error_follows_from_its_status(
    server: httpx.AsyncClient, path: str, status: int, kind: str, code: str | None
) -> None:
    answer = await server.get(path)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (status, kind, code)
    assert error["hint"]


async def test_a_server_that_is_not_ready_is_a_server_error(server: httpx.AsyncClient) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    answer = await server.post("/v1/chat/completions", json=body)
    kind = {404: "not_found_error", 503: "server_error"}[answer.status_code]
    assert answer.json()["error"]["type"] == kind


@pytest.mark.parametrize(
    ("cors", "origin", "allowed"),
    [
        (False, "http://localhost:3000", False),
        (True, "http://localhost:3000", True),
        (True, "http://127.0.0.1:5173", True),
        (True, "http://[::1]:5173", True),
        (True, "https://example.com", False),
        (True, "http://localhost.example.com", False),
    ],
)
async def test_browsers_may_call_from_loopback_pages_where_asked(
    apps: dict[bool, httpx.ASGITransport], cors: bool, origin: str, allowed: bool
) -> None:
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    async with client(apps[cors]) as connected:
        preflight = await connected.options("/v1/chat/completions", headers=headers)
        answer = await connected.get("/health", headers={"Origin": origin})
    for response in (preflight, answer):
        assert (response.headers.get("access-control-allow-origin") == origin) is allowed


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ("NaN", "`NaN` is not a JSON number"),
        ("-Infinity", "`-Infinity` is not a JSON number"),
        ("1e999", "`1e999` is not a JSON number"),
        ("1" * 5000, "an integer of 5000 digits"),
        (r'"\ud83d"', "half of a character"),
        (r'"\uDE00 \ud83d\ude00"', "half of a character"),
        ('"\xff"', "codec can't decode"),
        ("tru", "Expecting value"),
    ],
)
@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
async def test_a_body_that_an_answer_could_not_echo_is_refused(
    server: httpx.AsyncClient, path: str, value: str, fault: str
) -> None:
    body = f'{{"metadata": {{"a": {value}}}}}'.encode("latin-1")
    answer = await server.post(f"/v1/{path}", content=body, headers=JSON)
    assert answer.status_code == 400
    assert "`body` is not JSON: " in answer.text and fault in answer.json()["error"]["message"]


async def test_a_whole_character_may_be_escaped(server: httpx.AsyncClient) -> None:
    body = rb'{"model": "m", "prompt": "\ud83d\ude00"}'
    answer = await server.post("/v1/completions", content=body, headers=JSON)
    assert answer.json()["error"]["code"] == "model_not_found"


def test_the_log_has_no_traceback_of_an_error_that_it_names_already() -> None:
    def shown(error: BaseException, cause: Exception | None = None) -> bool:
        error.__cause__ = cause
        told = (type(error), error, None)
        record = logging.LogRecord("uvicorn.error", logging.ERROR, "", 0, "", (), told)
        return ExpectedErrors().filter(record)

    started = "Caught handled exception, but response already started."
    assert not shown(asyncio.CancelledError())
    assert not shown(RuntimeError(started), Diverged("`loss/train` is `nan`"))
    assert shown(RuntimeError(started), ValueError("a mistake of ours"))
    assert shown(RuntimeError("a mistake of ours"))
