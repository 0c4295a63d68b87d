"""The server's end of an engine on another machine, which a Ray actor runs there."""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from trainer.engines.engine import Delta, SampleRequest
from trainer.errors import CheckpointError, WorkerDied
from trainer.machines.lora_files import Broadcast, hashes_of
from trainer.machines.ray_cluster import Actor
from trainer.processes.rpc import RpcClient

logger = logging.getLogger(__name__)
LOAD_WITHIN = 600.0  # seconds; a training step waits until every engine holds its LoRA


class RemoteEngine:
    """An engine on another machine. `read_replies` runs as long as the actor lives."""

    def __init__(self, actor: Actor, name: str, broadcast: Broadcast) -> None:
        self.name = name
        self._actor = actor
        self._broadcast = broadcast
        self._connected = asyncio.Event()
        self._lost = asyncio.Event()
        self._rpc = RpcClient(self._write, self.died)
        self._loading = asyncio.Lock()
        self._held: set[str] = set()

    async def read_replies(self) -> None:
        """Pass replies to the calls that wait for them, until the actor dies."""
        try:
            async with contextlib.aclosing(self._actor.replies()) as batches:  # type: ignore[type-var]
                async for replies in batches:
                    self._connected.set()  # the first batch is empty
                    for reply in replies:
                        self._rpc.receive(reply)
        except WorkerDied as error:
            logger.info("the actor on `%s` is gone: %s", self.name, error.message)
        finally:
            self.close()

    async def wait_until_connected(self) -> None:
        """Wait until the actor listens; raises the error if it dies instead."""
        await self._connected.wait()
        if self._lost.is_set():
            raise self.died()

    async def wait_until_lost(self) -> None:
        await self._lost.wait()

    def close(self) -> None:
        """Give the engine up: every call that waits for it fails."""
        self._lost.set()
        self._connected.set()
        self._rpc.fail_all()

    async def call(self, method: str, **params: Any) -> Any:
        return await self._rpc.call(method, **params)

    async def load(self, lora: str, path: Path) -> None:
        """Load a LoRA, after sending the files that the machine lacks."""
        if lora in self._held:  # do not wait for the lock while another LoRA is being sent
            return
        async with self._loading, asyncio.timeout(LOAD_WITHIN):
            if lora in self._held:
                return
            hashes = await hashes_of(path)
            if missing := (await self.call("load", lora=lora, hashes=hashes))["missing"]:
                for name in missing:
                    content = await self._broadcast.reference(path / name, hashes[name])
                    await self._actor.store(content)
                missing = (await self.call("load", lora=lora, hashes=hashes))["missing"]
            if missing:
                raise CheckpointError(
                    f"The LoRA `{lora}` arrived damaged: the sha256 of `{missing[0]}` is not "
                    f"`{hashes[missing[0]][:12]}…`",
                    hint="Verify the original checkpoint with `launcher pull`",
                )
            self._held.add(lora)

    async def unload(self, lora: str) -> None:
        self._held.discard(lora)
        await self.call("unload", lora=lora)

    async def sample(self, request: SampleRequest) -> AsyncIterator[Delta]:
        async with contextlib.aclosing(
            self._rpc.stream("sample", **dataclasses.asdict(request))  # type: ignore[type-var]
        ) as rows:
            async for row in rows:
                try:
                    delta = Delta.from_json(row)
                except TypeError:
                    raise self.died() from None  # it runs another version
                yield delta

    def _write(self, message: str) -> None:
        if self._lost.is_set():
            raise self.died()
        self._actor.send(message)

    def died(self) -> WorkerDied:
        return WorkerDied(
            f"The engine on `{self.name}` was lost",
            hint="Ray starts it again if its machine is there; see `.art/nodes` on that machine",
        )
