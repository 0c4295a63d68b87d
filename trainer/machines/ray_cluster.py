"""Ray's door: the machines of a Ray cluster, and one actor on each of them.

Ray knows who is a member, gives each actor its GPUs, restarts an actor that dies, and carries
files. The server only joins a cluster that exists, and only with a token: whoever may talk to Ray
may run code on every machine.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kit.errors import NotInstalled
from kit.package_data import how_to_install
from trainer.errors import TrainerError, WorkerDied

NAMESPACE = "art"
LEARNER = "art_learner"  # resource of machines that may train
PLACED_WITHIN = 60.0  # seconds; a machine whose GPUs somebody else uses is tried again later


@dataclass(frozen=True)
class Machine:
    """A machine of the cluster."""

    id: str
    name: str
    address: str
    cpus: float
    gpus: float
    learns: bool
    """Whether it may train: one that can be taken away at any time only samples."""


def token_for(key: str) -> str:
    """Ray's token for a cluster with this key; `scripts/ray-cluster` computes the same."""
    return hashlib.sha256(f"ray:{key}".encode()).hexdigest()


def connect(address: str, key: str) -> "RayCluster":
    """Join the Ray cluster at `address`: HOST:PORT, or `auto` for the one on this machine."""
    os.environ["RAY_AUTH_MODE"] = "token"
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        os.environ["RAY_AUTH_TOKEN"] = token_for(key)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # A server that is told to stop ends in order; Ray would print a stack trace first.
    os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
    try:
        import ray
    except ImportError as error:
        raise NotInstalled(
            "`--ray` needs Ray, which is not installed", hint=how_to_install("ray")
        ) from error
    logging.getLogger("ray").setLevel(logging.ERROR)
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", address)
    host = address.rpartition(":")[0]
    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            configure_logging=False,
            # The server runs on the head; Ray would guess another of its addresses.
            **({"_node_ip_address": host} if host else {}),
        )
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise TrainerError(
            f"Cannot join the Ray cluster `{address}`: {str(error).splitlines()[0]}",
            hint="Start it here with `scripts/ray-cluster head`, with the same `ART_API_KEY`",
        ) from error
    return RayCluster()


class RayCluster:
    """The cluster that this process has joined. Calls to Ray that may wait run in threads."""

    def __init__(self) -> None:
        import ray

        self._ray = ray
        self._own_id = ray.get_runtime_context().get_node_id()
        (own,) = [node for node in ray.nodes() if node["NodeID"] == self._own_id]
        self.address = str(own["NodeManagerAddress"])
        """This machine's address, where the others reach it."""

    async def machines(self) -> list[Machine]:
        """The other machines that are alive."""
        nodes = await asyncio.to_thread(self._ray.nodes)
        return [
            Machine(
                id=node["NodeID"],
                name=node["NodeManagerHostname"],
                address=node["NodeManagerAddress"],
                cpus=node["Resources"].get("CPU", 0.0),
                gpus=node["Resources"].get("GPU", 0.0),
                learns=LEARNER in node["Resources"],
            )
            for node in nodes
            if node["Alive"] and node["NodeID"] != self._own_id
        ]

    async def actor(self, kind: type[Any], machine: Machine, *arguments: Any) -> "Actor":
        """The actor on a machine: the one of a server before this one, or a new one.

        It is given the whole machine, outlives this process, and is restarted if it dies.
        """
        handle = await self._named(machine)
        if handle is None:
            group = await self._place(machine)
            options = {
                "name": machine.id,
                "lifetime": "detached",
                "num_cpus": machine.cpus,
                "num_gpus": machine.gpus,
                "max_restarts": -1,
                "scheduling_strategy": _in_group(group),
            }
            create = self._ray.remote(kind).options(**options).remote
            handle = await asyncio.to_thread(create, *arguments)
        return Actor(handle)

    async def remove(self, machine: Machine) -> None:
        """End the actor of a machine for good, and give the machine back."""
        if handle := await self._named(machine):
            await asyncio.to_thread(self._ray.kill, handle, no_restart=True)
        if group := await self._group(machine):
            await asyncio.to_thread(self._ray.util.remove_placement_group, group)

    async def put(self, value: Any) -> Any:
        """Put a value into the object store, from which every machine fetches it."""
        return await asyncio.to_thread(self._ray.put, value)

    def leave(self) -> None:
        self._ray.shutdown()

    async def _named(self, machine: Machine) -> Any:
        try:
            return await asyncio.to_thread(self._ray.get_actor, machine.id)
        except ValueError:  # there is none
            return None

    async def _group(self, machine: Machine) -> Any:
        try:
            return await asyncio.to_thread(self._ray.util.get_placement_group, machine.id)
        except ValueError:  # there is none
            return None

    async def _place(self, machine: Machine) -> Any:
        """Reserve all CPUs and GPUs of a machine."""
        group = await self._group(machine)
        if group is None:
            wanted = {"CPU": machine.cpus, "GPU": machine.gpus}
            group = await asyncio.to_thread(
                self._ray.util.placement_group,
                [{kind: amount for kind, amount in wanted.items() if amount}],
                name=machine.id,
                lifetime="detached",
                bundle_label_selector=[{"ray.io/node-id": machine.id}],
            )
        if not await asyncio.to_thread(group.wait, PLACED_WITHIN):
            await asyncio.to_thread(self._ray.util.remove_placement_group, group)
            raise TrainerError(
                f"Ray has not given `{machine.name}` to this server",
                hint="Another program uses it; see `ray status`",
            )
        return group


def _in_group(group: Any) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(group)


class Actor:
    """A machine's actor: what the server asks of it through Ray."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def open(self) -> tuple[int, str]:
        """The port of the actor's machine that answers calls, and the secret to begin with."""
        with _as_died():
            port, secret = await self._handle.open.remote()
        return port, secret

    async def store(self, content: Any) -> None:
        """Send a file that is in the object store."""
        with _as_died():
            await self._handle.store.remote(content)

    async def stop(self) -> None:
        """Let the actor stop its processes in order, before it is removed."""
        with _as_died():
            await self._handle.stop.remote()


@contextlib.contextmanager
def _as_died() -> Iterator[None]:
    from ray.exceptions import RayError

    try:
        yield
    except RayError as error:
        raise WorkerDied(str(error).splitlines()[0]) from error
