"""The rows of metrics of a step under way, which any number of readers follow."""

import asyncio
from collections.abc import AsyncIterator, Iterable

from kit.types import Json


class StepRows:
    """The rows so far, and whether more can come."""

    def __init__(self) -> None:
        self.so_far: list[Json] = []
        self.ended = False
        self._changed = asyncio.Condition()

    async def add(self, row: Json) -> None:
        self.so_far.append(row)
        await self._notify()

    async def start_over(self, rows: Iterable[Json] = ()) -> None:
        """Replace the rows: a second attempt has the same ones, from the first on."""
        self.so_far = list(rows)
        await self._notify()

    async def end(self) -> None:
        self.ended = True
        await self._notify()

    async def read(self) -> AsyncIterator[Json]:
        """Yield every row from the first to the last, even if the step is over already."""
        count = 0
        while not self.ended or count < len(self.so_far):
            await self._wait_for(count)
            # A second attempt starts the rows over, with the same values.
            new = self.so_far[count:]
            count += len(new)
            for row in new:
                yield row

    async def _wait_for(self, index: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.ended or len(self.so_far) > index)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
