"""Beyond a stated number of requests a client is told to come back, in its own API's form."""

import asyncio
import socket
import time

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from trainer.server.app import KEEP_ALIVE, uvicorn_config
from trainer.server.crowd import RETRY_AFTER, Crowd
from trainer.server.messages.errors import AnthropicErrors

ROUTES = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/rollouts/r/v1/chat/completions",
]


class Crowded:
    """An app in which every request waits until it may end."""

    def __init__(self, limit: int) -> None:
        self.waiting, self.may_end = 0, asyncio.Event()
        app = FastAPI()
        app.post("/{path:path}")(self.wait)
        app.get("/health")(self.health)
        app.add_middleware(Crowd, limit=limit)
        app.add_middleware(AnthropicErrors)
        transport = httpx.ASGITransport(app)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    async def wait(self, path: str) -> None:
        self.waiting += 1
        await self.may_end.wait()

    async def health(self) -> None:
        pass

    async def fill(self, path: str, count: int) -> list["asyncio.Task[httpx.Response]"]:
        requests = [asyncio.create_task(self.client.post(path)) for _ in range(count)]
        async with asyncio.timeout(10):
            while self.waiting < count:
                await asyncio.sleep(0)
        return requests


@pytest.mark.parametrize("path", ROUTES)
async def test_one_request_too_many_is_told_to_come_back(path: str) -> None:
    app = Crowded(limit=3)
    present = await app.fill(path, 3)
    refused = await app.client.post(path)
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == str(RETRY_AFTER)
    assert "--max-requests" in refused.text
    error = refused.json()["error"]
    assert error["type"] == "rate_limit_error"
    assert ("code" in error) == (path != "/v1/messages")
    assert (await app.client.get("/health")).status_code == 200
    app.may_end.set()
    assert [response.status_code for response in await asyncio.gather(*present)] == [200] * 3
    assert (await app.client.post(path)).status_code == 200


async def test_requests_that_do_not_sample_are_never_refused() -> None:
    app = Crowded(limit=1)
    present = await app.fill("/v1/chat/completions", 1)
    app.may_end.set()
    for path in ("/_train_model", "/v1/messages/count_tokens", "/_log"):
        assert (await app.client.post(path)).status_code == 200
    await asyncio.gather(*present)


async def test_an_idle_connection_outlives_the_pools_of_clients_but_not_the_server() -> None:
    """httpx keeps connections for 5 s and Go for 90 s; the server closed them after 5 s too."""
    assert KEEP_ALIVE > 90
    app = FastAPI()
    config = uvicorn_config(app)
    assert config.timeout_keep_alive == KEEP_ALIVE
    server = uvicorn.Server(config)
    bound = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{bound.getsockname()[1]}") as client:
        assert (await client.get("/openapi.json")).status_code == 200
        began = time.monotonic()
        server.should_exit = True
        await serving
    assert time.monotonic() - began < KEEP_ALIVE / 4
