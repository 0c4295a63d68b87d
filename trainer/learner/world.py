"""The processes that train one step together: FSDP2 shards of the base model, rows shared out.

Every process prepares the same request, so that they agree without talking. The frozen weights
are sharded layer by layer; the LoRA is small, so each process keeps it whole and its gradients are
summed. Only the first process speaks with the server and writes checkpoints.
"""

import json
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from trainer.errors import Unsupported
from trainer.learner.pack import Row
from trainer.policy.model import Policy
from trainer.processes.rpc import read_error, write_error

T = TypeVar("T")
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
                self.broadcast({"error": write_error(error)})
                raise
        outcome = self.broadcast(outcome)
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
        return load(self.broadcast_bytes(save(found)))

    def broadcast(self, value: Any = None) -> Any:
        """Give the first process' `value` to all. As JSON: others may be on other machines."""
        return json.loads(self.broadcast_bytes(json.dumps(value).encode()))

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Give the first process' `data` to all."""
        if self.size == 1:
            return data
        length = torch.tensor([len(data)])
        dist.broadcast(length, src=0)
        given = data if self.rank == 0 else bytes(int(length))
        tensor = torch.frombuffer(bytearray(given), dtype=torch.uint8)
        dist.broadcast(tensor, src=0)
        return tensor.numpy().tobytes()


def join(device: torch.device) -> World:
    """Join the world whose process torchrun started, if it did."""
    if dist.is_torchelastic_launched():
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backends = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backends, timeout=IDLE_FOR)
    return World()
