"""Streams of events: none waits for its reader longer than stated, and each closes its sources.

A request that samples keeps the gate open, so a client that stops reading would stop a training
step, and with it every other client. What it has not read is therefore buffered up to a limit.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

logger = logging.getLogger(__name__)
BUFFER = 32 << 20  # bytes that a reader may be behind: about 70,000 tokens of a chat
PIECE = 1 << 16  # bytes sent at once
STALLED = 15.0  # seconds that sampling waits for a reader with a full buffer to take anything
PATIENCE = 60.0  # seconds that it waits in all for a reader that is merely slow
SILENCE = 600.0  # seconds without reading anything, after which the connection is closed


class ClosingStream(StreamingResponse):
    """A stream that lets go of a reader that has stopped, and always closes its sources."""

    def __init__(
        self,
        *sources: AsyncGenerator[Any, None],
        headers: Mapping[str, str] | None = None,
        media_type: str = "text/event-stream",
    ) -> None:
        """Send the first of `sources`, which reads from the others."""
        super().__init__(sources[0], media_type=media_type, headers=headers)
        self._sources = sources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._buffer = _Buffer()
        self._tasks = [asyncio.create_task(self._fill())]
        try:
            await super().__call__(scope, receive, send)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _fill(self) -> None:
        # This task reads the sources, so only it can close them at any time.
        try:
            await self._buffer.fill(self._sources[0])
        finally:
            for source in self._sources:
                await source.aclose()

    async def stream_response(self, send: Send) -> None:
        """Send the events, while the other task reads them from the source at its own pace."""
        (filling,) = self._tasks
        sending = asyncio.create_task(self._send(self._buffer, send))
        self._tasks.append(sending)
        try:
            await asyncio.wait({filling, sending}, return_when=asyncio.FIRST_COMPLETED)
            if self._buffer.reader_stopped:
                return _let_go(f"{BUFFER >> 20} MiB of events are waiting for it")
            await sending
        except TimeoutError:
            _let_go(f"it has read nothing for {SILENCE:.0f} s")

    async def _send(self, buffer: "_Buffer", send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        more = True
        while more:
            body, more = await buffer.take()
            async with asyncio.timeout(SILENCE):
                await send({"type": "http.response.body", "body": body, "more_body": more})


class _Buffer:
    """The events that a reader has not been sent yet."""

    def __init__(self) -> None:
        self._events: deque[bytes] = deque()
        self._size = 0
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()
        self._ended = False
        self._error: BaseException | None = None
        self.reader_stopped = False

    async def fill(self, source: AsyncGenerator[str | bytes, None]) -> None:
        """Read the source to its end. Stop early if the reader is too far behind for too long."""
        left, clock = PATIENCE, asyncio.get_running_loop().time
        try:
            async for event in source:
                self._add(event.encode() if isinstance(event, str) else event)
                while self._size > BUFFER:
                    started = clock()
                    self._taken.clear()
                    async with asyncio.timeout(min(STALLED, left)):
                        await self._taken.wait()
                    left -= clock() - started
        except TimeoutError as error:
            # The source may have raised it too; then there was room.
            self.reader_stopped = self._size > BUFFER
            self._error = error
        except Exception as error:
            self._error = error
        finally:
            self._ended = True
            self._changed.set()

    def _add(self, event: bytes) -> None:
        self._events.append(event)
        self._size += len(event)
        self._changed.set()

    async def take(self) -> tuple[bytes, bool]:
        """Return the next events in one piece, and whether more may follow."""
        while not self._events and not self._ended:
            self._changed.clear()
            await self._changed.wait()
        if not self._events and self._error:
            raise self._error
        more = bool(self._events)
        piece = bytearray()
        while self._events and len(piece) < PIECE:
            piece += self._events.popleft()
        self._size -= len(piece)
        self._taken.set()
        return bytes(piece), more


def _let_go(why: str) -> None:
    logger.warning("closing a stream whose reader has stopped: %s", why)
