"""Sampling and training take turns: requests wait while a step trains, they do not fail."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Many may sample at once; training waits for those in flight and holds back the rest."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._sampling = 0
        self._training = False

    @asynccontextmanager
    async def sampling(self) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._training)
            self._sampling += 1
        try:
            yield
        finally:
            self._sampling -= 1
            await self._notify()

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._training)
            self._training = True  # from here on new requests wait
            await self._changed.wait_for(lambda: self._sampling == 0)
        try:
            yield
        finally:
            self._training = False
            await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
