"""Clients that leave before their answer: what was begun for them ends with them.

uvicorn tells a handler nothing of it, and Starlette leaves a stream that it cut to the garbage
collector. Either would hold the gate, behind which the next training step waits.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
LEFT = 499  # nginx's number for it; nobody is there to read it


class ClientLeft(Exception):
    """Nobody waits for the answer any more."""


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives; it is cancelled when the client leaves, with ClientLeft raised here."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class ClosingStream(StreamingResponse):
    """A stream of events that closes its sources however it ends."""

    def __init__(self, *sources: AsyncGenerator[Any, None]) -> None:
        """The first of `sources` is what is sent; it draws on the others."""
        super().__init__(sources[0], media_type="text/event-stream")
        self._sources = sources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for source in self._sources:
                await source.aclose()
