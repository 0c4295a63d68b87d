"""When a client disconnects, its sampling stops and nothing is recorded."""

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

from trainer.base_model.resolve import resolve
from trainer.base_model.tokenizer import Tokenizer
from trainer.engines.engine import Delta
from trainer.server.disconnects import ClientLeft
from trainer.server.guard import Guard
from trainer.server.routes import openai


class Client:
    """Sends a chat, and disconnects once `left` is set."""

    def __init__(self, **settings: Any) -> None:
        message = {"role": "user", "content": "q"}
        self.body = json.dumps({"model": "m", "messages": [message], **settings}).encode()
        self.left = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self.got: list[Any] = []

    async def receive(self) -> dict[str, Any]:
        if self.body:
            body, self.body = self.body, b""
            return {"type": "http.request", "body": body}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.got.append(message)
        await self.reads.wait()


class Sampling:
    """A backend that samples one token, then never continues."""

    def __init__(self, first: bool) -> None:
        self.first = first
        self.sampling, self.ended = asyncio.Event(), asyncio.Event()
        self.recorded: list[Any] = []
        self.models = SimpleNamespace(find=lambda name: None)
        self.rollouts = SimpleNamespace(record=lambda *entry: self.recorded.append(entry))
        self.workers = SimpleNamespace(tokenizer=Tokenizer(resolve("tiny-random")))
        self.encode = lambda text, rollout: self.workers.tokenizer.encode(text)

    async def sample(self, *_: Any, **__: Any) -> AsyncIterator[tuple[int, Delta]]:
        try:
            if self.first:
                yield 0, Delta(0, [7], [-1.0], "a")
            self.sampling.set()
            await asyncio.Event().wait()
        finally:
            self.ended.set()


def serve(backend: Sampling, client: Client) -> "asyncio.Task[None]":
    app = FastAPI()
    app.include_router(openai.routes(backend), prefix="/rollouts/{rollout}")  # type: ignore[arg-type]
    path = "/rollouts/r/v1/chat/completions"
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    return asyncio.create_task(Guard(app, key=None)(scope, client.receive, client.send))


@pytest.mark.parametrize(("stream", "first"), [(False, True), (False, False), (True, False)])
async def test_sampling_for_a_client_that_left_stops_and_is_not_recorded(
    stream: bool, first: bool
) -> None:
    backend, client = Sampling(first), Client(stream=stream)
    serving = serve(backend, client)
    await backend.sampling.wait()
    client.left.set()
    with pytest.raises(ClientLeft):  # the server turns it into an answer that nobody reads
        await serving
    assert backend.ended.is_set() and not backend.recorded


async def test_a_stream_closes_at_once_when_a_stalled_reader_leaves() -> None:
    backend, client = Sampling(first=True), Client(stream=True)
    client.reads.clear()
    serving = serve(backend, client)
    while not client.got:
        await asyncio.sleep(0)
    client.left.set()
    await asyncio.wait([serving])
    assert backend.ended.is_set() and not backend.recorded
    serving.exception()
