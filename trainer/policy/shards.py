"""A policy that several processes hold together: FSDP2 gives each a shard of every frozen weight.

The policy is sharded before it has weights. Each process then reads only its own rows of every
tensor, one tensor at a time, so that no process and no GPU ever holds the whole model. A layer's
weights are gathered when the layer runs, and released afterwards.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.base_model.weight_files import expected_shapes, shards
from trainer.policy.compiled_layer import JOINED, join_parameters, part_joined
from trainer.policy.weights import check_complete, check_shape, hugging_face_name, opened


def shard(policy: Any, dtype: torch.dtype, *, joined: bool) -> None:
    """Shard the frozen weights of a policy on the meta device; `joined` suits compiled layers."""
    # Here, because most learners are alone and it is slow to import.
    from torch.distributed.fsdp import fully_shard

    policy.requires_grad_(False)
    # A sharded group must have one dtype, so the LoRA and the norms, in fp32, stay whole.
    whole = set()
    for name, parameter in policy.named_parameters():
        if ".lora_" in name or name.endswith(".scale"):
            whole.add(parameter)
        else:
            parameter.data = parameter.data.to(dtype)
    for layer in policy.layers:
        if joined:
            join_parameters(layer)
        fully_shard(layer, ignored_params=whole)
        if joined:
            layer.register_forward_pre_hook(part_joined)  # after FSDP's hook, which gathers
    fully_shard(policy, ignored_params=whole)


@torch.no_grad()
def place_shards(policy: Any, directory: Path, *, device: torch.device) -> None:
    """Load this process's rows of the weights in `directory` into a policy that was sharded."""
    shapes = expected_shapes(policy.architecture)
    files = locate(directory, shapes)
    policy.to_empty(device=device)
    for name, parameter in policy.named_parameters():
        if ".lora_" not in name:
            rows, start = own_rows(parameter)
            fill(rows, start, [(files[one], one, shapes[one][0]) for one in sources(name)])


def locate(directory: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, Path]:
    """The file of every weight. Raises ModelError unless all are there with these shapes."""
    found = {}
    for path in shards(directory):
        with opened(path) as file:
            for name in sorted(shapes.keys() & set(file.keys())):
                check_shape(name, file.get_slice(name).get_shape(), shapes[name])
                found[name] = path
    check_complete(directory, set(shapes), set(found))
    return found


def sources(name: str) -> list[str]:
    """The Hugging Face names of the weights whose rows a parameter holds, in order."""
    module, _, kind = name.rpartition(".")
    if not kind.startswith("joined_"):
        return [hugging_face_name(name)]
    (names,) = (names for names in JOINED if module.endswith(f".{names[0]}"))
    layer = module.removesuffix(names[0])
    return [hugging_face_name(f"{layer}{one}.{kind.removeprefix('joined_')}") for one in names]


def own_rows(parameter: Any) -> tuple[Tensor, int]:
    """The rows of a parameter that this process holds, and the number of the first one."""
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        return parameter, 0
    mesh = parameter.device_mesh
    each = -(-len(parameter) // mesh.size())  # FSDP divides like `torch.chunk`
    return parameter.to_local(), mesh.get_local_rank() * each


def fill(rows: Tensor, start: int, weights: list[tuple[Path, str, int]]) -> None:
    """Copy rows from `start` on of the concatenated weights: file, name and length of each."""
    first = 0
    for path, name, length in weights:
        begin, end = max(start, first), min(start + len(rows), first + length)
        if begin < end:
            # Open the file for each tensor: pages that were read count as memory until it closes.
            with opened(path) as file:
                part = file.get_slice(name)[begin - first : end - first]
                rows[begin - start : end - start].copy_(part)
                del part
        first += length
