"""No page in a browser can use the server, by any route, method or way in."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pydantic
import pytest
from fastapi import FastAPI

from trainer.config import ServerConfig
from trainer.server.app import create_app
from trainer.server.backend import Backend

EVIL = "https://evil.example"


def connect(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")


def create(state: Path, **settings: Any) -> FastAPI:
    config = ServerConfig(state_dir=str(state), **settings)
    return create_app(config, Backend(config, openai_port=8000))


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    return create(tmp_path_factory.mktemp("state"), allowed_hosts=("gpu.lan",))


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with connect(app) as connected:
        yield connected


def requests_of(app: FastAPI) -> list[tuple[str, str]]:
    paths = app.openapi()["paths"]
    return [(method.upper(), path) for path in paths for method in paths[path]]


@pytest.mark.parametrize(
    "headers",
    [{"Host": "evil.example"}, {"Host": "evil.example:8000"}, {"Origin": EVIL}, {"Origin": "null"}],
)
async def test_every_route_refuses_a_foreign_host_and_a_foreign_page(
    app: FastAPI, client: httpx.AsyncClient, headers: dict[str, str]
) -> None:
    served = [*requests_of(app), ("GET", "/"), ("GET", "/nowhere"), ("OPTIONS", "/register")]
    assert len(served) > 40
    for method, path in served:
        answer = await client.request(method, path, json={}, headers=headers)
        assert answer.status_code == 403, (method, path)
        error = answer.json()["error"]
        assert error["type"] == "permission_error" and next(iter(headers.values())) in str(error)


async def test_no_body_is_read_unless_it_is_declared_as_json(
    app: FastAPI, client: httpx.AsyncClient
) -> None:
    posts = [path for method, path in requests_of(app) if method == "POST"]
    for path in posts:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "text/json", "json", None):
            headers = {} if kind is None else {"Content-Type": kind}
            answer = await client.post(path, content=b"{}", headers=headers)
            assert answer.status_code == 415, (path, kind)
            assert "`Content-Type: application/json`" in answer.text
        for kind in ("application/json; charset=utf-8", "application/vnd.art+json"):
            answer = await client.post(path, content=b"{}", headers={"Content-Type": kind})
            assert answer.status_code != 415, (path, kind)


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "LOCALHOST:9000", "127.0.0.1:1", "127.0.0.10:8000", "[::1]:8000", "[::1]"),
        *("0.0.0.0:7999", "[::ffff:127.0.0.1]:80", "gpu.lan", "gpu.lan:8000", ""),
    ],
)
async def test_local_names_with_any_port_and_allowed_names_pass(
    client: httpx.AsyncClient, host: str
) -> None:
    assert (await client.get("/health", headers={"Host": host})).status_code == 200
    origin = f"http://{host}" if host else "http://localhost:3000"
    answer = await client.get("/health", headers={"Host": host, "Origin": origin})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        *("localhost.evil.example", "127.0.0.1.nip.io", "127.0.0.1@evil.example", "2130706433"),
        *("evil.example#localhost", "localhost,evil.example", "10.0.0.5", "[::2]", "lan", "["),
        *("evil.gpu.lan", "localhost.", "127.1", "[127.0.0.1]x", "localhost:80:80", "\xff"),
    ],
)
async def test_names_that_only_look_local_are_refused(client: httpx.AsyncClient, host: str) -> None:
    raw = host.encode("latin-1")
    assert (await client.get("/health", headers={"Host": raw})).status_code == 403
    origin = b"http://" + raw
    assert (await client.get("/health", headers={"Origin": origin})).status_code == 403


@pytest.mark.parametrize("origin", ["file://", "chrome-extension://a", "//localhost", "localhost"])
async def test_an_origin_is_a_web_page_of_an_allowed_host(
    client: httpx.AsyncClient, origin: str
) -> None:
    assert (await client.get("/health", headers={"Origin": origin})).status_code == 403


async def test_a_second_host_or_origin_does_not_hide_the_first(client: httpx.AsyncClient) -> None:
    for name, values in (("Host", ("localhost", "evil.example")), ("Origin", ("null", EVIL))):
        headers = [(name, value) for value in values]
        assert (await client.get("/health", headers=headers)).status_code == 403


async def test_a_page_may_link_to_the_server_but_not_load_anything_from_it(
    client: httpx.AsyncClient,
) -> None:
    image = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
    link = {**image, "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert (await client.get("/v1/models", headers=image)).status_code == 403
    assert (await client.get("/v1/models", headers=link)).status_code == 200
    assert (await client.post("/close", headers=link)).status_code == 403
    # JavaScript outside of browsers sends this much.
    assert (await client.post("/close", headers={"Sec-Fetch-Mode": "cors"})).status_code == 200


async def test_with_a_key_any_host_passes_and_a_foreign_page_still_does_not(tmp_path: Path) -> None:
    key = pydantic.SecretStr("secret")
    app = create(tmp_path, host="0.0.0.0", api_key=key)
    bearer = {"Authorization": "Bearer secret", "Host": "gpu.example:8000"}
    own = {"Origin": "http://gpu.example:8000"}
    async with connect(app) as client:
        assert (await client.get("/v1/models", headers=bearer)).status_code == 200
        assert (await client.get("/v1/models", headers={**bearer, **own})).status_code == 200
        assert (await client.get("/v1/models", headers={"Host": "gpu.example"})).status_code == 401
        refused = await client.get("/v1/models", headers={**bearer, "Origin": EVIL})
        assert refused.status_code == 403


async def test_errors_on_anthropics_routes_have_its_shape(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/messages", json={}, headers={"Origin": EVIL})
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "permission_error"
