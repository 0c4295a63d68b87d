"""The embedded engine: samples with our own model in a worker process, no extra dependency."""

import dataclasses
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from trainer.channel import Worker, visible
from trainer.engines.engine import Delta, SampleRequest


class EmbeddedEngine:
    """Handle of `trainer.engines.embedded_worker`."""

    name = "embedded"

    def __init__(self, model: Path, *, log: Path, devices: str | None = None) -> None:
        self._worker = Worker(
            "engine",
            "trainer.engines.embedded_worker",
            ["--model", str(model)],
            log=log,
            environment=visible(devices),
        )
        self._loaded: set[str] = set()

    @property
    def running(self) -> bool:
        return self._worker.running

    async def start(self) -> None:
        if self._worker.pid is None:
            await self._worker.start()
        else:
            await self._revive()

    async def stop(self) -> None:
        await self._worker.stop()

    async def configure(self, arguments: Mapping[str, Any]) -> None:
        """Nothing to do: `trainer.server.settings` refuses what would need something done."""

    async def load(self, lora: str, path: Path) -> None:
        await self._revive()
        if lora not in self._loaded:
            await self._worker.call("load", lora=lora, path=str(path))
            self._loaded.add(lora)

    async def unload(self, lora: str) -> None:
        self._loaded.discard(lora)
        await self._worker.call("unload", lora=lora)

    async def sample(self, request: SampleRequest) -> AsyncIterator[Delta]:
        await self._revive()
        async for row in self._worker.stream("sample", **dataclasses.asdict(request)):
            yield Delta(**row)

    async def _revive(self) -> None:
        if await self._worker.revive():
            self._loaded.clear()
