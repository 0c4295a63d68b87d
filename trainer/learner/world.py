"""The processes that train one step together: FSDP2 shards of the base model, rows shared out.

Every process prepares the same request, so that they agree without talking. The frozen weights
are sharded layer by layer; the LoRA is small, so each process keeps it whole and its gradients are
summed. Only the first process speaks with the server and writes checkpoints.
"""

import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from trainer.calls import read_error, write_error
from trainer.errors import Unsupported
from trainer.learner.pack import Row
from trainer.model import Policy

T = TypeVar("T")
JOIN_WITHIN = timedelta(minutes=30)  # other machines may still be set up
BROKEN = "broken"  # set in the store by a process that comes a second time
IDLE_FOR = timedelta(days=365)  # a process waits for the next step as long as it takes


class World:
    """This process' place among the others; alone unless there is a process group."""

    def __init__(self) -> None:
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0

    def shard(self, policy: Policy) -> None:
        """Keep only this process' share of the frozen weights; they are gathered when used."""
        if self.size == 1:
            return
        if policy.lora is None:
            raise Unsupported(
                "Full finetuning on several processes is not supported",
                hint="Train a LoRA, or use one process",
            )
        # Sharded groups must have one dtype: the LoRA and the norms, in fp32, stay whole.
        whole = {
            parameter
            for name, parameter in policy.named_parameters()
            if parameter.requires_grad or name.endswith(".scale")
        }
        for layer in policy.layers:
            fully_shard(layer, ignored_params=whole)
        fully_shard(policy, ignored_params=whole)

    def share(self, rows: Sequence[Row]) -> list[tuple[Row, float]]:
        """This process' rows with their weights. All get equally many: gathering takes all."""
        rounds = -(-len(rows) // self.size)
        mine = [self.rank + turn * self.size for turn in range(rounds)]
        return [(rows[at], 1.0) if at < len(rows) else (rows[0], 0.0) for at in mine]

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Sum each tensor over all processes, in place."""
        if self.size > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)

    def on_first(self, work: Callable[[], T]) -> T:
        """Run `work` in the first process; all get its result, which is JSON, or its error."""
        if self.size == 1:
            return work()
        outcome: dict[str, Any] = {}
        if self.rank == 0:
            try:
                outcome = {"result": work()}
            except Exception as error:
                self.tell({"error": write_error(error)})
                raise
        outcome = self.tell(outcome)
        if "error" in outcome:
            raise read_error(outcome["error"])
        result: T = outcome["result"]
        return result

    def tensors(self, read: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Run `read` in the first process, which alone has the run's disk; all get the tensors."""
        if self.size == 1:
            return read()
        found: dict[str, Tensor] = {}
        self.on_first(lambda: found.update(read()))
        return load(self.tell_bytes(save(found)))

    def tell(self, value: Any = None) -> Any:
        """Give the first process' `value` to all. As JSON: others may be on other machines."""
        return json.loads(self.tell_bytes(json.dumps(value).encode()))

    def tell_bytes(self, data: bytes) -> bytes:
        """Give the first process' `data` to all."""
        if self.size == 1:
            return data
        length = torch.tensor([len(data)])
        dist.broadcast(length, src=0)
        given = data if self.rank == 0 else bytes(int(length))
        tensor = torch.frombuffer(bytearray(given), dtype=torch.uint8)
        dist.broadcast(tensor, src=0)
        return tensor.numpy().tobytes()


def start_others(processes: int, *, nodes: int = 1, number: int = 0, master: str = "") -> None:
    """Start the other processes of this machine; each joins as `join` does.

    Of several machines this is `number`, and their first process is met at `master`. The variables
    are torchrun's.
    """
    address, _, port = master.rpartition(":")
    if nodes == 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address, port = "127.0.0.1", str(probe.getsockname()[1])
    elif interface := interface_towards(address):
        # Else they may take the address of the host's name, which on some machines is loopback.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    first = number * processes
    os.environ |= {
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "WORLD_SIZE": str(nodes * processes),
        "RANK": str(first),
        "LOCAL_RANK": "0",
    }
    command = [sys.executable, "-m", "trainer.learner.worker", *sys.argv[1:]]
    for local in range(1, processes):
        place = {"RANK": str(first + local), "LOCAL_RANK": str(local)}
        subprocess.Popen(command, env={**os.environ, **place})


def interface_towards(address: str) -> str | None:
    """The network interface from which `address` is reached; None where it has another address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing
        except OSError:
            return None
        own = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                found = fcntl.ioctl(probe, 0x8915, request)[20:24]  # SIOCGIFADDR
            except OSError:
                continue  # it has no address
            if found == own:
                return name
    return None


def _listen(place: tuple[str, int]) -> int:
    """A socket that listens at `place`, as a file descriptor for its next owner."""
    family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
    with socket.create_server(place, family=family) as server:
        return server.detach()


def join(device: torch.device) -> World:
    """Join the process group that the environment names, if any."""
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if size > 1:
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=_meet(rank, size),
            rank=rank,
            world_size=size,
            timeout=IDLE_FOR,
        )
    return World()


def _meet(rank: int, size: int) -> Any:
    """The store of the world; one that this process was in before has lost it, and is ended."""
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

    def store(**how: Any) -> Any:
        return dist.TCPStore(*place, size, timeout=JOIN_WITHIN, **how)  # type: ignore[attr-defined]

    # A listening socket, else it would listen on every address of this machine.
    first = {"is_master": True, "master_listen_fd": _listen(place)} if rank == 0 else {}
    met = store(**first)
    # By a store of its own: this one is busy for as long as somebody waits for others.
    threading.Thread(target=_watch, args=[store(wait_for_workers=False)], daemon=True).start()
    if met.add(f"joined/{rank}", 1) > 1:
        met.set(BROKEN, "yes")
        time.sleep(JOIN_WITHIN.total_seconds())  # until the watch ends this process too
    return met


def _watch(store: Any) -> None:
    """End this process when its world is broken: what waits for a lost process never returns."""
    while True:
        time.sleep(1)
        try:
            broken = store.check([BROKEN])
        except Exception:  # its first process is gone, in words that differ by version
            broken = True
        if broken:
            sys.stderr.write("The learner's processes lost each other\n")
            sys.stderr.flush()
            os._exit(1)
