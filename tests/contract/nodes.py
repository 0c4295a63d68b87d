"""A server's engines in this process, and a real Ray cluster on loopback that they span."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.ray_cluster import KEY, RayHosts
from trainer.base_model.resolve import resolve
from trainer.config import ServerConfig
from trainer.engines.embedded import EmbeddedEngine
from trainer.machines.ray_cluster import connect
from trainer.machines.replicas import Replicas

CONFIG = ServerConfig(engine="embedded")


@asynccontextmanager
async def engines_of(hosts: RayHosts, directory: Path) -> AsyncIterator[Replicas]:
    """Join a cluster, and serve with the machines that it has."""
    own = EmbeddedEngine(resolve("tiny-random"), log=directory / "own.log")
    cluster = await asyncio.to_thread(connect, hosts.address, KEY)
    replicas = Replicas(own, CONFIG, "tiny-random", cluster)
    await replicas.start()
    try:
        yield replicas
    finally:
        await replicas.stop()


async def wait_until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.02)


async def ready(replicas: Replicas, number: int = 2) -> None:
    await wait_until(lambda: len(replicas._ready) == number)
