"""A stream whose reader stops is let go; one that is read slowly arrives whole."""

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.responses import Response

from trainer.server import streams
from trainer.server.app import uvicorn_config
from trainer.server.gate import Gate
from trainer.server.streams import ClosingStream

EVENT = "data: " + "x" * 1000 + "\n\n"


class Sampling:
    """Samples `count` events while it holds the gate, and can fail after them."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.gate = Gate()
        self.began = asyncio.Event()
        self.count = count
        self.error = error
        self.app = FastAPI()
        self.app.get("/stream")(self.stream)

    async def stream(self) -> Response:
        return ClosingStream(self.events())

    async def events(self) -> AsyncGenerator[str, None]:
        async with self.gate.sampling():
            self.began.set()
            for _ in range(self.count):
                yield EVENT
                await asyncio.sleep(0)
            if self.error:
                raise self.error


@asynccontextmanager
async def reader(sampling: Sampling) -> AsyncIterator[socket.socket]:
    """A client that has sent its request over a real connection, and has read nothing yet."""
    bound = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn_config(sampling.app))
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    try:
        client.connect(bound.getsockname())
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(client, b"GET /stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(20):
            await sampling.began.wait()  # a short stream may have ended when this returns
        yield client
    finally:
        client.close()
        server.should_exit = True
        await serving


async def test_training_begins_although_a_stream_is_never_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(streams, "BUFFER", 1 << 20)
    monkeypatch.setattr(streams, "STALLED", 0.2)
    sampling = Sampling(count=1_000_000)
    async with reader(sampling), asyncio.timeout(20), sampling.gate.closed():
        pass
    assert "closing a stream whose reader has stopped: 1 MiB" in caplog.text


async def test_sampling_ends_although_an_answer_that_fits_the_buffer_is_never_read() -> None:
    sampling = Sampling(count=10_000)
    async with reader(sampling) as client, asyncio.timeout(20):
        async with sampling.gate.closed():
            pass
        assert (await _read_all(client)).count(b"data: ") == 10_000


async def test_a_slow_reader_gets_every_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "BUFFER", 1 << 18)
    sampling = Sampling(count=6_000)
    async with reader(sampling) as client, asyncio.timeout(20):
        await asyncio.sleep(0.2)  # the buffer is full by now
        assert sampling.gate.in_use
        assert (await _read_all(client)).count(b"data: ") == 6_000


async def test_a_reader_that_trickles_is_let_go_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "BUFFER", 1 << 18)
    monkeypatch.setattr(streams, "PATIENCE", 0.3)
    sampling = Sampling(count=1_000_000)
    loop = asyncio.get_running_loop()

    async def trickle(client: socket.socket) -> None:
        while await loop.sock_recv(client, 1 << 16):
            await asyncio.sleep(0.02)

    async with reader(sampling) as client, asyncio.timeout(20):
        reading = asyncio.create_task(trickle(client))
        async with sampling.gate.closed():
            reading.cancel()


async def test_a_reader_that_reads_nothing_for_long_loses_its_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(streams, "SILENCE", 0.2)
    sampling = Sampling(count=10_000)
    async with reader(sampling), asyncio.timeout(20):
        while "it has read nothing for" not in caplog.text:
            await asyncio.sleep(0.01)


async def test_an_error_after_some_events_ends_the_stream_behind_them() -> None:
    sampling = Sampling(count=20, error=RuntimeError("the engine died"))
    async with reader(sampling) as client, asyncio.timeout(20):
        assert (await _read_all(client)).count(b"data: ") == 20
        assert not sampling.gate.in_use


async def _read_all(client: socket.socket) -> bytes:
    """Read until the end of a chunked answer, or until the connection ends."""
    loop, found = asyncio.get_running_loop(), bytearray()
    while not found.endswith(b"0\r\n\r\n") and (piece := await loop.sock_recv(client, 1 << 16)):
        found += piece
    return bytes(found)
