"""Stops the work for a client that disconnects before its answer.

uvicorn does not notify a handler, and Starlette leaves a cut stream to the garbage collector.
Either way the request would hold the gate, and the next training step would wait for it.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
LEFT = 499  # nginx's status for a closed connection; no client reads it


class ClientLeft(Exception):
    """The client disconnected before its answer."""


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; if the client disconnects, cancel it and raise ClientLeft."""
    working = asyncio.create_task(work)
    disconnected = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({working, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        return working.result()
    finally:
        working.cancel()
        disconnected.cancel()
        await asyncio.gather(working, disconnected, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class ClosingStream(StreamingResponse):
    """A stream of events that always closes its sources when it ends."""

    def __init__(
        self, *sources: AsyncGenerator[Any, None], headers: Mapping[str, str] | None = None
    ) -> None:
        """Send the first of `sources`, which reads from the others."""
        super().__init__(sources[0], media_type="text/event-stream", headers=headers)
        self._sources = sources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for source in self._sources:
                await source.aclose()
