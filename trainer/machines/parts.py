"""One vLLM over several machines, for a model that is larger than one of them.

vLLM divides the model itself, by tensor or pipeline parallelism: `vllm serve` runs on this machine
and, without an API, in the Ray actor of each of the others. A part that is lost ends all of them,
and the next request starts them again, with another machine if one is free.
"""

import asyncio
import contextlib
import hashlib
import logging
import shutil
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from kit.types import Json
from trainer.config import ServerConfig
from trainer.errors import TrainerError, WorkerDied
from trainer.machines.members import Members, settings_for
from trainer.machines.ray_cluster import RayCluster
from trainer.machines.remote_engine import RemoteEngine

logger = logging.getLogger(__name__)
JOIN_WITHIN = 1800.0  # seconds; rented machines come up one after the other


class Parts:
    """The parts of vLLM on other machines (`OtherParts`)."""

    def __init__(self, config: ServerConfig, base_model: str, cluster: RayCluster) -> None:
        self.environment: Mapping[str, str] = {"VLLM_HOST_IP": cluster.address}
        self.failure: WorkerDied | None = None
        self.learner_address = f"{cluster.address}:{config.learner_port}"
        self._config = config
        self._base_model = base_model
        self._address = cluster.address
        self._members = Members(cluster, self._serve, nodes=config.nodes)
        self._machines: dict[RemoteEngine, int | None] = {}
        """Connected machines, longest first, with their number in the learner."""
        self._joined = asyncio.Event()
        self._working: dict[RemoteEngine, asyncio.Task[None]] = {}
        self._on_lost: Callable[[], Awaitable[None]] | None = None
        # A name for LoRAs that can exist on every machine, wherever that keeps its files.
        self._links = Path(tempfile.mkdtemp(prefix="art-loras-"))
        self._shared: dict[str, Path] = {}

    async def start(
        self, arguments: Mapping[str, Any], on_lost: Callable[[], Awaitable[None]]
    ) -> Json:
        await self.stop()
        self._members.start()
        machines = await self._enough_machines()
        self.failure, self._on_lost = None, on_lost
        ours: Json = {
            "nnodes": self._config.engine_nodes,
            "master_addr": self._address,
            "master_port": _free_port(self._address),
            "distributed_executor_backend": "mp",
        }
        for rank, machine in enumerate(machines, 1):
            logger.info("vLLM's part %s is on `%s`", rank, machine.name)
            theirs = {**arguments, **ours, "node_rank": rank}
            self._working[machine] = asyncio.create_task(self._work(machine, theirs))
        return {**ours, "node_rank": 0}

    async def share(self, lora: str, path: Path) -> Path:
        link = self._links / hashlib.sha256(str(path).encode()).hexdigest()[:16]
        if self._shared.get(lora, link) != link:  # a new run has the name of an old one
            await self.unshare(lora)
        if not link.is_symlink():
            link.symlink_to(path)
        self._shared[lora] = link
        await asyncio.gather(*(self._send(machine, link, path) for machine in self._working))
        return link

    async def unshare(self, lora: str) -> None:
        link = self._shared.pop(lora, None)
        if link is None or link in self._shared.values():
            return
        link.unlink(missing_ok=True)
        for machine in list(self._machines):
            with contextlib.suppress(TrainerError):  # a lost machine deletes it when it is back
                await machine.unload(link.name)

    async def stop(self) -> None:
        tasks = list(self._working.values())
        self._working.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def leave(self) -> None:
        await self.stop()
        await self._members.stop()
        shutil.rmtree(self._links, ignore_errors=True)

    async def _serve(self, machine: RemoteEngine, number: int | None) -> None:
        """Have a machine join the learner, and keep it for vLLM as long as it is there."""
        await machine.call("join_learner", **self._settings(number))
        links = [link.name for link in self._shared.values()]
        await machine.call("keep_only", loras=links)  # others may be of an earlier server
        self._machines[machine] = number
        self._joined.set()
        logger.info("`%s` is ready; machines: %s", machine.name, len(self._machines) + 1)
        try:
            await machine.wait_until_lost()
        finally:
            del self._machines[machine]

    def _settings(self, number: int | None) -> Json:
        return settings_for(self._config, self._base_model, self.learner_address, number)

    async def _enough_machines(self) -> list[RemoteEngine]:
        """Wait for as many machines as vLLM is divided over, without this one."""
        wanted = self._config.engine_nodes
        deadline = time.monotonic() + JOIN_WITHIN
        while (found := len(self._machines) + 1) < wanted:
            logger.info("vLLM waits for %s of its %s machines", wanted - found, wanted)
            self._joined.clear()
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._joined.wait()
            except TimeoutError:
                raise WorkerDied(
                    f"`engine_nodes` is {wanted}, but the Ray cluster has {found} machines",
                    hint="Add machines with `scripts/ray-cluster join`, or lower `--engine-nodes`",
                ) from None
        return list(self._machines)[: wanted - 1]

    async def _work(self, machine: RemoteEngine, arguments: Json) -> None:
        try:
            settings = self._settings(self._machines.get(machine))
            await machine.run("work", **settings, arguments=arguments)
        except TrainerError as error:
            await self._lose(machine, error)

    async def _send(self, machine: RemoteEngine, link: Path, path: Path) -> None:
        try:
            await machine.load(link.name, path, link=str(link))
        except WorkerDied as error:
            await self._lose(machine, error)
            raise

    async def _lose(self, machine: RemoteEngine, error: TrainerError) -> None:
        """End this machine's vLLM too, unless the parts were already started again."""
        if self._working.pop(machine, None):
            logger.warning("vLLM's part on `%s` is lost: %s", machine.name, error.message)
            self.failure = WorkerDied(
                f"vLLM's part on `{machine.name}` ended: {error.message}", hint=error.hint
            )
            assert self._on_lost
            await self._on_lost()


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
