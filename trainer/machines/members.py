"""Membership: an engine on every machine of a Ray cluster, for as long as the machine is there."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from kit.errors import KitError
from kit.state_dir import STATE_DIR
from kit.types import Json
from trainer.config import ServerConfig
from trainer.engines.choose import engine_kind, vllm_arguments
from trainer.machines.lora_files import Broadcast
from trainer.machines.machine_actor import MachineActor
from trainer.machines.ray_cluster import Actor, Machine, RayCluster
from trainer.machines.remote_engine import RemoteEngine

logger = logging.getLogger(__name__)
LOOK_EVERY = 1.0  # seconds
STOP_WITHIN = 10.0  # seconds that the engine of a machine has to end in order
NODES = Path(STATE_DIR) / "nodes"

Serve = Callable[[RemoteEngine, int | None], Awaitable[None]]
"""Starts an engine and sends it requests until it is lost. The number is its machine's among those
that train together, from 1; None only samples."""


def settings_for(
    config: ServerConfig, base_model: str, learner_address: str, number: int | None
) -> Json:
    """What a machine needs to start the same engine, or its part of it, and its learner."""
    settings: Json = {
        "engine": engine_kind(config),
        "engine_args": vllm_arguments(config),
        "lora": {"rank": config.lora.rank},
        "ray": config.ray,
        "engine_nodes": config.engine_nodes,
    }
    learner = None
    if number is not None:
        # The learner has the same number of GPUs on every machine. A machine that only samples
        # uses all of its GPUs for that.
        settings |= {name: getattr(config, name) for name in ("engine_devices", "learner_devices")}
        learner = {"master": learner_address, "nodes": config.nodes, "number": number}
    return {"base_model": base_model, "settings": settings, "learner": learner}


class Members:
    """Watches the cluster, and keeps an engine on each of its other machines."""

    def __init__(
        self, cluster: RayCluster, serve: Serve, *, nodes: int, kind: type = MachineActor
    ) -> None:
        """`nodes` machines, including this one, train together."""
        self._cluster = cluster
        self._broadcast = Broadcast(cluster)
        self._serve = serve
        self._nodes = nodes
        self._kind = kind
        self._watching: asyncio.Task[None] | None = None
        self._keeping: dict[Machine, asyncio.Task[None]] = {}
        self._actors: dict[Machine, Actor] = {}
        self._numbers: dict[Machine, int | None] = {}

    def start(self) -> None:
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Stop the engines of all machines, and leave the cluster."""
        if self._watching:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await asyncio.gather(*(self._stop(machine) for machine in list(self._keeping)))
        self._cluster.leave()

    async def _watch(self) -> None:
        while True:
            try:
                machines = await self._cluster.machines()
            except Exception as error:  # Ray's head may be starting again
                logger.warning("Ray does not answer: %s", error)
                machines = list(self._keeping)
            for machine in set(self._keeping) - set(machines):
                logger.warning("`%s` has left the cluster", machine.name)
                await self._forget(machine)
            for machine in machines:
                if machine not in self._keeping:
                    self._numbers[machine] = self._lowest_free_number() if machine.learns else None
                    self._keeping[machine] = asyncio.create_task(self._keep(machine))
            await asyncio.sleep(LOOK_EVERY)

    async def _keep(self, machine: Machine) -> None:
        """Serve with a machine, again and again: Ray restarts its actor, and we its engine."""
        delay = 1.0
        while True:
            began = time.monotonic()
            try:
                await self._connect(machine)
            except Exception as error:
                told = error.message if isinstance(error, KitError) else repr(error)
                logger.warning("the engine on `%s` cannot join: %s", machine.name, told)
            delay = 1.0 if time.monotonic() - began > 60 else min(delay * 2, 30.0)
            await asyncio.sleep(delay)

    async def _connect(self, machine: Machine) -> None:
        directory = str(NODES / f"{machine.name}-{machine.address}")
        actor = await self._cluster.actor(self._kind, machine, directory, machine.address)
        self._actors[machine] = actor
        engine = await RemoteEngine.connect(machine, actor, self._broadcast)
        reading = asyncio.create_task(engine.read_replies())
        try:
            await self._serve(engine, self._numbers[machine])
        finally:
            engine.close()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _forget(self, machine: Machine) -> None:
        """Give up a machine, so that its number is free and Ray does not wait for it."""
        task = self._keeping.pop(machine)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        del self._numbers[machine]
        self._actors.pop(machine, None)
        try:
            await self._cluster.remove(machine)
        except Exception as error:  # its machine is gone, and perhaps Ray too
            logger.info("the actor of `%s` was not removed: %s", machine.name, error)

    async def _stop(self, machine: Machine) -> None:
        try:
            async with asyncio.timeout(STOP_WITHIN):
                if actor := self._actors.get(machine):
                    await actor.stop()
        except Exception as error:  # it is ended all the same
            logger.info("the engine on `%s` did not stop in order: %r", machine.name, error)
        await self._forget(machine)

    def _lowest_free_number(self) -> int | None:
        """The lowest number in the learner that no machine has, if any is left."""
        free = set(range(1, self._nodes)) - set(self._numbers.values())
        return min(free, default=None)
