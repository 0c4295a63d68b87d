"""Base model weights by Hugging Face name, memory-mapped from safetensors shards."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from trainer.base_model.weight_files import shards
from trainer.errors import ModelError

# TorchTune's name within a layer -> Hugging Face's.
IN_LAYER = {
    "attn.q_proj": "self_attn.q_proj",
    "attn.k_proj": "self_attn.k_proj",
    "attn.v_proj": "self_attn.v_proj",
    "attn.output_proj": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "mlp.w1": "mlp.gate_proj",
    "mlp.w2": "mlp.down_proj",
    "mlp.w3": "mlp.up_proj",
    "sa_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
AT_TOP = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.scale": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def hugging_face_names(model: nn.Module) -> dict[str, str]:
    """Map our name of every base weight to its Hugging Face name. Values are the same."""
    return {
        name: hugging_face_name(name)
        for name, _ in model.named_parameters()
        if ".lora_" not in name
    }


def hugging_face_name(name: str) -> str:
    if name in AT_TOP:
        return AT_TOP[name]
    _, layer, rest = name.split(".", 2)
    module, kind = rest.rsplit(".", 1)
    return f"model.layers.{layer}.{IN_LAYER[module]}.{'weight' if kind == 'scale' else kind}"


def place_weights(
    model: nn.Module, directory: Path, *, dtype: torch.dtype, device: torch.device
) -> None:
    """Load the weights in `directory`, converted if necessary, into a model on the meta device."""
    names = hugging_face_names(model)
    tensors = read_tensors(directory, set(names.values()))
    state = {}
    for ours, theirs in names.items():
        tensor = tensors.pop(theirs)
        check_shape(theirs, tensor.shape, model.get_parameter(ours).shape)
        # Norms are computed in fp32, so their weights stay in fp32.
        state[ours] = tensor.to(device, torch.float32 if ours.endswith(".scale") else dtype)
    model.load_state_dict(state, strict=False, assign=True)


def check_shape(name: str, found: Sequence[int], expected: Sequence[int]) -> None:
    if list(found) != list(expected):
        raise ModelError(
            f"`{name}` has shape `{list(found)}`, not `{list(expected)}`",
            hint="The weights and `config.json` belong to different models: download it again",
        )


def check_complete(directory: Path, wanted: set[str], found: set[str]) -> None:
    if missing := sorted(wanted - found):
        raise ModelError(
            f"The weights in `{directory}` lack `{missing[0]}`", hint="Download the model again"
        )


def read_tensors(directory: Path, wanted: set[str]) -> dict[str, Tensor]:
    """Map the tensors named in `wanted` from disk. Pages are read when they are first used."""
    found = stored_tensors(directory, wanted)
    check_complete(directory, wanted, set(found))
    return found


def stored_tensors(directory: Path, wanted: set[str] | None = None) -> dict[str, Tensor]:
    """Map the tensors in `directory`, or only those in `wanted`, from disk."""
    found: dict[str, Tensor] = {}
    for shard in shards(directory):
        with opened(shard) as file:
            names = set(file.keys())
            for name in sorted(names if wanted is None else names & wanted):
                found[name] = file.get_tensor(name)
    return found


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file, whose faults are errors of the model."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as exc:
        raise ModelError(
            f"`{path}` cannot be read: {exc}", hint="Download the model again"
        ) from exc
