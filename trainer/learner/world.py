"""The processes that train one step together: FSDP2 shards the base model, and rows are split.

Every process prepares the same request, so they agree without communicating. Each one loads only
its shard of the frozen weights (`trainer/policy/shards.py`). The LoRA is small, so each process
keeps all of it, and its gradients are summed. Only the first process talks to the server and writes
checkpoints.
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

from trainer.learner.pack import Row
from trainer.processes.rpc import read_error, write_error

T = TypeVar("T")
IDLE_FOR = timedelta(days=365)  # the next step may come at any time


class World:
    """This process's rank among all learner processes. It is alone without a process group."""

    def __init__(self) -> None:
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0

    def share(self, rows: Sequence[Row]) -> list[tuple[Row, float]]:
        """This process's rows with weights. All get the same number, as gathering needs all."""
        rounds = -(-len(rows) // self.size)
        mine = [self.rank + turn * self.size for turn in range(rounds)]
        return [(rows[at], 1.0) if at < len(rows) else (rows[0], 0.0) for at in mine]

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Sum each tensor over all processes, in place."""
        if self.size > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)

    def on_first(self, work: Callable[[], T]) -> T:
        """Run `work` in the first process. All get its result, which must be JSON, or its error."""
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
        """Run `read` in the first process, which alone has the run's disk. All get the tensors."""
        if self.size == 1:
            return read()
        found: dict[str, Tensor] = {}
        self.on_first(lambda: found.update(read()))
        return load(self.broadcast_bytes(save(found)))

    def broadcast(self, value: Any = None) -> Any:
        """Send the first process's `value` to all, as JSON: they may be on other machines."""
        return json.loads(self.broadcast_bytes(json.dumps(value).encode()))

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Send the first process's `data` to all."""
        if self.size == 1:
            return data
        length = torch.tensor([len(data)])
        dist.broadcast(length, src=0)
        buffer = data if self.rank == 0 else bytes(int(length))
        tensor = torch.frombuffer(bytearray(buffer), dtype=torch.uint8)
        dist.broadcast(tensor, src=0)
        return tensor.numpy().tobytes()


def join(device: torch.device) -> World:
    """Join the process group if torchrun started this process."""
    if dist.is_torchelastic_launched():
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backends = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backends, timeout=IDLE_FOR)
    return World()
