"""Who may open the page where the API needs a key."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from trainer.config import ServerConfig
from trainer.page import sessions
from trainer.page.sessions import COOKIE, Sessions
from trainer.server.app import create_app
from trainer.server.backend import Backend

KEY = {"authorization": "Bearer secret"}


@pytest.fixture
async def client(tmp_path: Path) -> Any:
    config = ServerConfig(state_dir=str(tmp_path), api_key="secret", require_key=True)
    backend = Backend(config, openai_port=0)
    transport = httpx.ASGITransport(create_app(config, backend))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client
    await backend.stop()


async def test_nothing_is_served_without_the_key(client: Any) -> None:
    for path in ("/", "/files/main.js", "/api/runs", "/api/events", "/?session=x"):
        assert (await client.get(path)).status_code == 401, path
    assert (await client.post("/api/login-token")).status_code == 401
    assert (await client.get("/api/runs", headers=KEY)).status_code == 200


async def test_a_token_opens_the_page_once_and_only_the_page(client: Any) -> None:
    token = (await client.post("/api/login-token", headers=KEY)).json()["token"]
    answer = await client.get(f"/?token={token}")
    assert answer.status_code == 303 and answer.headers["location"] == "/"
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "samesite=strict" in cookie.lower() and token not in cookie
    assert (await client.get("/api/runs")).status_code == 200  # the client keeps cookies
    assert (await client.get("/")).status_code == 200
    # The cookie opens nothing that changes or samples anything.
    for path in ("/metrics", "/v1/models", "/openapi.json"):
        assert (await client.get(path)).status_code == 401, path
    for path in ("/register", "/v1/chat/completions", "/api/login-token", "/api/runs", "/"):
        assert (await client.post(path, json={})).status_code == 401, path
    client.cookies.clear()
    assert (await client.get(f"/?token={token}")).status_code == 401, "a token works once"
    assert (await client.get("/?token=guess")).status_code == 401
    for value in ("guess", "", '"; x=', "\x7f"):
        headers = {"cookie": f"{COOKIE}={value}"}
        assert (await client.get("/api/runs", headers=headers)).status_code == 401


def test_tokens_and_sessions_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(sessions.time, "monotonic", lambda: now[0])
    known = Sessions()
    token = known.new_token()
    now[0] += sessions.TOKEN_SECONDS + 1
    assert known.redeem(token) is None
    session = known.redeem(known.new_token())
    headers = [(b"cookie", f"{COOKIE}={session}".encode())]
    scope = {"path": "/api/runs", "method": "GET", "query_string": b"", "headers": headers}
    assert known.may_pass(scope)
    now[0] += sessions.SESSION_SECONDS + 1
    assert not known.may_pass(scope)
    for _ in range(sessions.MOST + 50):
        known.new_token()
    assert len(known._tokens) == sessions.MOST
