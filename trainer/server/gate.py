"""Closes the engine to requests where it cannot sample: they wait instead of failing."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class Gate:
    """Many requests sample at once; closing the gate waits for those in flight and blocks new ones.

    It is closed during a step that needs the engine's memory, during every step of a server that
    takes turns, and while the engine restarts with other settings.
    """

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []
        self._sampling = 0
        self._closed = False

    @property
    def in_use(self) -> bool:
        return self._closed or self._sampling > 0

    @asynccontextmanager
    async def sampling(self) -> AsyncIterator[None]:
        await self._until(lambda: not self._closed)
        self._sampling += 1
        try:
            yield
        finally:
            self._sampling -= 1
            self._changed()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        await self._until(lambda: not self._closed)
        self._closed = True  # from here on new requests wait
        try:
            await self._until(lambda: self._sampling == 0)
            yield
        finally:
            self._closed = False
            self._changed()

    async def _until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn

    def _changed(self) -> None:
        # No `await` here: a client that disconnects cancels its request at any `await`.
        waiting, self._waiting = self._waiting, []
        for turn in waiting:
            if not turn.done():
                turn.set_result(None)
