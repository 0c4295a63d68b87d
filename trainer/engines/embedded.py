"""The embedded engine: our own decoder in a worker process, without extra dependencies."""

import dataclasses
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from trainer.engines.engine import Delta, SampleRequest
from trainer.processes.worker import Worker

KEPT = 8  # LoRAs in memory; a long run makes hundreds


class EmbeddedEngine:
    """The server's handle on `trainer.engines.embedded_worker`."""

    name = "embedded"

    def __init__(
        self, model: Path, *, log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self._worker = Worker(
            "engine",
            "trainer.engines.embedded_worker",
            ["--model", str(model)],
            log=log,
            environment=environment,
        )
        self._paths: dict[str, Path] = {}
        """Every LoRA that a request may name."""
        self._loaded: dict[str, None] = {}
        """LoRAs in the worker's memory, least recently used first."""
        self._in_use = Counter[str]()

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
        """Do nothing: `server.client_settings` rejects every argument for this engine."""

    async def make_room(self) -> bool:
        return False

    async def load(self, lora: str, path: Path) -> None:
        self._paths[lora] = path
        await self._ensure_loaded(lora)

    async def unload(self, lora: str) -> None:
        self._paths.pop(lora, None)
        self._loaded.pop(lora, None)
        await self._worker.call("unload", lora=lora)

    async def sample(self, request: SampleRequest) -> AsyncIterator[Delta]:
        lora = request.lora or ""
        self._in_use[lora] += 1
        try:
            await self._ensure_loaded(lora)
            async for row in self._worker.stream("sample", **dataclasses.asdict(request)):
                yield Delta.from_json(row)
        finally:
            self._in_use[lora] -= 1

    async def _ensure_loaded(self, lora: str) -> None:
        """Load a LoRA into the worker, and unload the least recently used ones past `KEPT`."""
        await self._revive()
        if lora not in self._paths:
            return  # the base model, or an unknown LoRA, which the worker reports
        if lora not in self._loaded:
            await self._worker.call("load", lora=lora, path=str(self._paths[lora]))
        self._loaded.pop(lora, None)
        self._loaded[lora] = None
        for old in list(self._loaded)[:-KEPT]:
            if not self._in_use[old]:
                self._loaded.pop(old, None)
                await self._worker.call("unload", lora=old)

    async def _revive(self) -> None:
        if await self._worker.revive():
            self._loaded.clear()
