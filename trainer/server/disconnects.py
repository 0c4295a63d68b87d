"""Stops the work for a client that disconnects before its answer.

uvicorn does not notify a handler, so the request would be sampled to its end, and a step that takes
turns would wait for it. `trainer/server/streams.py` does the same for an answer that has begun.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request

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
