"""Samples several prompts concurrently, and yields their deltas as they arrive."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from trainer.engines.engine import Delta

Deltas = AsyncGenerator[tuple[int, Delta], None]
"""The deltas of one prompt, each with the policy step that sampled it."""
Merged = AsyncGenerator[tuple[int, int, Delta], None]
"""The deltas of several prompts, each with the number of its prompt and its policy step."""


async def merge(sources: Sequence[Deltas]) -> Merged:
    """Read all sources concurrently. The first that fails ends the others."""
    queue: asyncio.Queue[tuple[int, int, Delta] | Exception | None] = asyncio.Queue()

    async def read(number: int, source: Deltas) -> None:
        try:
            async for step, delta in source:
                queue.put_nowait((number, step, delta))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)
        finally:
            await source.aclose()

    tasks = [asyncio.create_task(read(*each)) for each in enumerate(sources)]
    try:
        unfinished = len(tasks)
        while unfinished:
            item = await queue.get()
            if item is None:
                unfinished -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
