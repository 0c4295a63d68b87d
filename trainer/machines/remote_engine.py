"""The server's end of an engine on another machine, which a Ray actor runs there."""

import asyncio
import contextlib
import dataclasses
import json
import logging
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

from trainer.engines.engine import Delta, SampleRequest
from trainer.errors import CheckpointError, WorkerDied
from trainer.machines.lora_files import Broadcast, hashes_of
from trainer.machines.ray_cluster import Actor, Machine
from trainer.processes.rpc import RpcClient

logger = logging.getLogger(__name__)
LIMIT = 64 << 20  # bytes in one message; the longest holds a prompt, or the tokens of a reply
CONNECT_WITHIN = 30.0  # seconds
LOAD_WITHIN = 600.0  # seconds; a training step waits until every engine holds its LoRA


class RemoteEngine:
    """An engine on another machine. `read_replies` runs as long as it is connected."""

    def __init__(
        self,
        name: str,
        actor: Actor,
        broadcast: Broadcast,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.name = name
        self._actor = actor
        self._broadcast = broadcast
        self._reader, self._writer = reader, writer
        self._lost = asyncio.Event()
        self._rpc = RpcClient(self._write, self.died)
        self._loading = asyncio.Lock()
        self._held: set[str] = set()

    @classmethod
    async def connect(cls, machine: Machine, actor: Actor, broadcast: Broadcast) -> "RemoteEngine":
        """Connect to the actor of a machine, which answers nobody else from then on."""
        port, secret = await actor.open()
        async with asyncio.timeout(CONNECT_WITHIN):
            reader, writer = await asyncio.open_connection(machine.address, port, limit=LIMIT)
        writer.write(f"{secret}\n".encode())
        return cls(machine.name, actor, broadcast, reader, writer)

    async def read_replies(self) -> None:
        """Pass replies to the calls that wait for them, until the connection ends."""
        try:
            while line := await self._reader.readline():
                self._rpc.receive(json.loads(line))
        except (OSError, ValueError) as error:
            logger.info("the connection to `%s` broke: %s", self.name, error)
        finally:
            self.close()

    async def wait_until_lost(self) -> None:
        await self._lost.wait()

    def close(self) -> None:
        """Give the engine up: every call that waits for it fails."""
        self._lost.set()
        self._writer.close()
        self._rpc.fail_all()

    async def call(self, method: str, **params: Any) -> Any:
        return await self._rpc.call(method, **params)

    async def run(self, method: str, **params: Any) -> None:
        """Call a method that runs until it fails. Cancelling this cancels it there too."""
        async with contextlib.aclosing(self._rpc.stream(method, **params)) as rows:  # type: ignore[type-var]
            async for _ in rows:
                pass

    async def load(self, lora: str, path: Path, *, link: str | None = None) -> None:
        """Load a LoRA, after sending the files that the machine lacks.

        With `link` the machine only keeps it, and makes it available there.
        """
        if lora in self._held:  # do not wait for the lock while another LoRA is being sent
            return
        async with self._loading, asyncio.timeout(LOAD_WITHIN):
            if lora in self._held:
                return
            hashes = await hashes_of(path)
            load = partial(self.call, "load", lora=lora, hashes=hashes, link=link)
            if missing := (await load())["missing"]:
                for name in missing:
                    content = await self._broadcast.reference(path / name, hashes[name])
                    await self._actor.store(content)
                missing = (await load())["missing"]
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
        self._writer.write(message.encode() + b"\n")

    def died(self) -> WorkerDied:
        return WorkerDied(
            f"The engine on `{self.name}` was lost",
            hint="Ray starts it again if its machine is there; see `.art/nodes` on that machine",
        )
