"""Several engines that act as one: this machine's own, and those of a Ray cluster.

Every replica loads a LoRA before any request samples from it. A request goes to the least busy
replica; if that one is lost, the request starts again on another. A replica that comes back loads
every served LoRA before it gets a request.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import ServerConfig
from trainer.engines.engine import Delta, Engine, SampleRequest, sample_with_retries
from trainer.engines.vllm import VllmEngine
from trainer.errors import NotFound, TrainerError, WorkerDied
from trainer.machines.machine_actor import MachineActor
from trainer.machines.members import Members, settings_for
from trainer.machines.parts import Parts
from trainer.machines.ray_cluster import RayCluster, connect
from trainer.machines.remote_engine import RemoteEngine

logger = logging.getLogger(__name__)
ATTEMPTS = 4  # a request that crashes this many engines would crash them all


@dataclass(eq=False)
class Replica:
    """One engine and its load."""

    engine: Engine | RemoteEngine
    name: str
    busy: int = 0
    """Choices being sampled now."""
    turn: int = 0
    """Number of its last request: of equally busy replicas, the one that waited longest is next."""


async def with_other_machines(
    own: Engine, config: ServerConfig, base_model: str
) -> tuple[Engine, str]:
    """Join the Ray cluster, whose machines act as one with `own`, or hold one model with it.

    Also returns HOST:PORT where the processes of their learner meet.
    """
    assert config.ray and config.api_key  # the server does not start without a key
    cluster = await asyncio.to_thread(connect, config.ray, config.api_key.get_secret_value())
    if config.engine_nodes > 1:
        assert isinstance(own, VllmEngine)  # no other is created for several machines
        parts = Parts(config, base_model, cluster)
        own.divide(parts)
        return own, parts.learner_address
    replicas = Replicas(own, config, base_model, cluster)
    return replicas, replicas.learner_address


class Replicas:
    """An `Engine` made of several. `own` is the engine of this machine."""

    def __init__(
        self,
        own: Engine,
        config: ServerConfig,
        base_model: str,
        cluster: RayCluster,
        *,
        kind: type = MachineActor,
    ) -> None:
        self.name = own.name
        self._own = Replica(own, "this machine")
        self._engine = own
        self._config = config
        self._base_model = base_model
        self.learner_address = f"{cluster.address}:{config.learner_port}"
        self._ready: list[Replica] = []
        self._members = Members(cluster, self._serve, nodes=config.nodes, kind=kind)
        self._arguments: dict[str, Any] = {}
        self._served: dict[str, Path] = {}
        self._turns = itertools.count(1)
        self._reviving: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        return bool(self._ready)

    async def start(self) -> None:
        self._members.start()  # first, so that other engines start while ours starts
        await self._engine.start()
        self._add(self._own)

    async def stop(self) -> None:
        self._ready.clear()  # from now on no machine is reported as lost
        await self._members.stop()
        if self._reviving:
            self._reviving.cancel()
        await self._engine.stop()

    async def configure(self, arguments: Mapping[str, Any]) -> None:
        await self._engine.configure(arguments)
        self._arguments.update(arguments)
        await asyncio.gather(
            *(
                self._or_lost(replica, replica.engine.call("configure", engine_args=arguments))
                for replica in list(self._ready)
                if isinstance(replica.engine, RemoteEngine)
            )
        )

    async def make_room(self) -> bool:
        if self._config.nodes > 1:
            return False  # every machine's engine would have to make room for its learner
        if self._reviving:
            await asyncio.wait([self._reviving])  # loading a LoRA would wake the engine
        return await self._engine.make_room()

    async def load(self, lora: str, path: Path) -> None:
        self._served[lora] = path
        if self._own not in self._ready:
            self._revive()
        await self._wait_for_one()
        await asyncio.gather(
            *(
                self._or_lost(replica, replica.engine.load(lora, path))
                for replica in list(self._ready)
            )
        )
        await self._wait_for_one()

    async def unload(self, lora: str) -> None:
        self._served.pop(lora, None)
        await asyncio.gather(
            *(self._or_lost(replica, replica.engine.unload(lora)) for replica in list(self._ready))
        )

    def sample(self, request: SampleRequest) -> AsyncIterator[Delta]:
        return sample_with_retries(
            lambda: self._attempt(request), attempts=ATTEMPTS, stream=request.stream
        )

    @asynccontextmanager
    async def _attempt(self, request: SampleRequest) -> AsyncIterator[AsyncIterator[Delta]]:
        """Sample on the least busy replica, which loses its place if its engine dies."""
        if request.lora is not None and request.lora not in self._served:
            raise NotFound(f"The LoRA `{request.lora}` is not loaded")
        replica = await self._least_busy()
        replica.busy += request.n
        replica.turn = next(self._turns)
        try:
            async with aclosing(replica.engine.sample(request)) as deltas:  # type: ignore[type-var]
                yield deltas
        except WorkerDied as error:
            self._lose(replica, error)
            raise
        finally:
            replica.busy -= request.n

    # Choosing and losing replicas

    async def _least_busy(self) -> Replica:
        await self._wait_for_one()
        return min(self._ready, key=lambda replica: (replica.busy, replica.turn))

    async def _wait_for_one(self) -> None:
        """Wait for a replica. If there is none, restart our own engine or raise its error."""
        while not self._ready:
            await asyncio.shield(self._revive())

    def _add(self, replica: Replica) -> None:
        self._ready.append(replica)
        logger.info("%s is ready; replicas: %s", replica.name, len(self._ready))

    async def _or_lost(self, replica: Replica, work: Coroutine[Any, Any, Any]) -> None:
        """Do `work` on a replica, and remove the replica if that fails.

        Errors of our own engine other than its death are raised: every replica would fail alike.
        """
        try:
            await work
        except WorkerDied as error:
            self._lose(replica, error)
        except (TrainerError, OSError) as error:
            if replica is self._own:
                raise
            self._lose(replica, error)

    def _lose(self, replica: Replica, error: Exception) -> None:
        if replica not in self._ready:
            return
        self._ready.remove(replica)
        message = getattr(error, "message", str(error) or type(error).__name__)
        logger.warning(
            "%s is lost with %s choices under way: %s", replica.name, replica.busy, message
        )
        if isinstance(replica.engine, RemoteEngine):
            replica.engine.close()
        else:
            self._revive()

    def _revive(self) -> asyncio.Task[None]:
        """Restart our own engine with every served LoRA, unless that is already under way."""
        if self._reviving is None or self._reviving.done():
            self._reviving = asyncio.create_task(self._revive_own())
            # Callers that wait for it get its error. If there is none, the next load tries again.
            self._reviving.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._reviving

    async def _revive_own(self) -> None:
        try:
            if not self._engine.running:
                await self._engine.start()
            await self._catch_up(self._engine)
        except TrainerError as error:
            logger.warning("cannot restart the engine of this machine: %s", error.message)
            raise
        if self._own not in self._ready:
            self._add(self._own)

    async def _catch_up(self, engine: Engine | RemoteEngine) -> None:
        """Load every served LoRA, including those that are added while it runs."""
        loaded: set[str] = set()
        while missing := [lora for lora in self._served if lora not in loaded]:
            for lora in missing:
                if path := self._served.get(lora):  # else it was unloaded in the meantime
                    await engine.load(lora, path)
                loaded.add(lora)

    # Other machines

    async def _serve(self, engine: RemoteEngine, number: int | None) -> None:
        """Have a machine start its engine and load every LoRA, then send it requests."""
        replica = Replica(engine, f"the engine on `{engine.name}`")
        arguments = dict(self._arguments)
        settings = settings_for(self._config, self._base_model, self.learner_address, number)
        logger.info("%s is starting", replica.name)
        await engine.call("begin", **settings, asked=arguments)
        await self._catch_up(engine)
        await engine.call("keep_only", loras=list(self._served))
        await self._catch_up(engine)  # LoRAs that were added in the meantime
        if arguments != self._arguments:
            return  # it is connected again and starts with the newer arguments
        self._add(replica)
        try:
            await engine.wait_until_lost()
        finally:  # also when the machine has left
            self._lose(replica, engine.died())
