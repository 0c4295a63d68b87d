"""The processes that train one step together: FSDP2 shards of the base model, rows shared out.

Every process prepares the same request, so that they agree without talking. The frozen weights
are sharded layer by layer; the LoRA is small, so each process keeps it whole and its gradients are
summed. Only the first process speaks with the server and writes checkpoints.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from trainer.errors import Unsupported
from trainer.learner.pack import Row
from trainer.model import Policy

T = TypeVar("T")


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
        """Run `work` in the first process; all get its result, or its error."""
        if self.size == 1:
            return work()
        outcome: list[Any] = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = work()
            except Exception as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            raise outcome[1]
        result: T = outcome[0]
        return result


def start_others(processes: int) -> list[subprocess.Popen[bytes]]:
    """Start the other processes of this command; each joins as `join` does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(processes),
        "RANK": "0",
        "LOCAL_RANK": "0",
    }
    command = [sys.executable, "-m", "trainer.learner.worker", *sys.argv[1:]]
    return [
        subprocess.Popen(command, env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(1, processes)
    ]


def join(device: torch.device) -> World:
    """Join the process group that the environment names (ours, or torchrun's), if any."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return World()
