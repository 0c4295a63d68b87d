"""GGUF files, which llama.cpp and Ollama load: a merged model, or a LoRA alone.

Weights are written one at a time, so that a large model needs little memory.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kit.version import version
from trainer.base_model.architecture import Architecture, Rope
from trainer.errors import CheckpointError, ModelError, Unsupported
from trainer.export.gguf_tokenizer import add_tokenizer
from trainer.export.merge import Weight
from trainer.policy.lora import read_lora_config

# Types that the package `gguf` writes by itself, most exact first.
TYPES = ("f32", "bf16", "f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
LORA_TYPES = TYPES[:3]
# In Hugging Face's and in llama.cpp's form the same family may differ in one way: where the two
# numbers of a rotation stand in q and k. llama.cpp's `llama` has them side by side.
FAMILIES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
ROTATED = ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")


def check(kind: str, architecture: Architecture, *, lora: bool) -> None:
    """Raise unless llama.cpp has this architecture, and `gguf` writes this type."""
    if kind not in TYPES:
        raise Unsupported(
            f"GGUF of type `{kind}` cannot be written here",
            hint=f"Choose from {_list(TYPES)}, or write `f16` and run llama.cpp's `llama-quantize`",
        )
    if lora and kind not in LORA_TYPES:
        raise Unsupported(
            f"A LoRA is not quantized to `{kind}`", hint=f"Choose from {_list(LORA_TYPES)}"
        )
    if fault := _fault(architecture):
        raise ModelError(
            f"llama.cpp has no `{architecture.family}` with {fault}",
            hint="Export without `--gguf`, and serve the model with vLLM",
        )


def _fault(architecture: Architecture) -> str | None:
    if FAMILIES[architecture.family] == "llama":
        return None
    if architecture.rope.kind == "llama3":
        return "RoPE scaling `llama3`"
    if architecture.output_bias or architecture.mlp_bias:
        return "a bias in these layers"
    width = architecture.heads * architecture.head_dim
    if architecture.family == "qwen2" and width != architecture.dim:
        return f"heads of `{architecture.head_dim}`"
    return None


def write_model(
    path: Path,
    weights: dict[str, Weight],
    architecture: Architecture,
    directory: Path,
    *,
    kind: str,
    name: str,
) -> None:
    """Write a model as one GGUF file. `directory` has its tokenizer; `weights` are consumed."""
    writer = _writer(architecture, name, "model")
    _add_architecture(writer, architecture, kind)
    add_tokenizer(writer, directory, architecture.vocab_size)
    names = _names(architecture)
    found: dict[str, Weight] = {}
    for theirs in list(weights):
        weight = weights.pop(theirs)
        if _is_unused(theirs, architecture):
            continue
        found[_name(names, theirs)] = _rotated(weight, theirs, architecture)
    if architecture.rope.kind == "llama3":
        found["rope_freqs.weight"] = Weight.of(torch.tensor(rope_factors(architecture)))
    _write(writer, path, found, kind)


def write_lora(
    path: Path,
    tensors: dict[str, Tensor],
    architecture: Architecture,
    checkpoint: Path,
    *,
    kind: str,
    name: str,
) -> None:
    """Write the LoRA `tensors` of a checkpoint, for `llama-server --lora`."""
    writer = _writer(architecture, name, "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(read_lora_config(checkpoint).alpha))
    names = _names(architecture)
    found: dict[str, Weight] = {}
    for theirs, tensor in sorted(tensors.items()):  # A before B, as readers expect
        module, _, half = theirs.removeprefix("base_model.model.").rpartition(".lora_")
        if half not in ("A.weight", "B.weight"):
            raise CheckpointError(f"`{theirs}` is no part of a LoRA", hint="Export it merged")
        of, weight = f"{module}.weight", Weight.of(tensor)
        if half == "B.weight":
            weight = _rotated(weight, of, architecture)
        found[f"{_name(names, of)}.lora_{half[0].lower()}"] = weight
    _write(writer, path, found, kind)


def _writer(architecture: Architecture, name: str, type_of_file: str) -> Any:
    from gguf import GGUFWriter

    writer = GGUFWriter(None, FAMILIES[architecture.family])
    writer.add_type(type_of_file)
    writer.add_name(name)
    writer.add_string("general.generated_by", f"art-cluster {version()}")
    return writer


def _add_architecture(writer: Any, architecture: Architecture, kind: str) -> None:
    from gguf import LlamaFileType, RopeScalingType

    prefix = "ALL" if kind == "f32" else "MOSTLY"
    writer.add_file_type(LlamaFileType[f"{prefix}_{kind.upper()}"])
    writer.add_quantization_version(2)
    writer.add_vocab_size(architecture.vocab_size)
    writer.add_context_length(architecture.max_length)
    writer.add_embedding_length(architecture.dim)
    writer.add_block_count(architecture.layers)
    writer.add_feed_forward_length(architecture.ffn_dim)
    writer.add_head_count(architecture.heads)
    writer.add_head_count_kv(architecture.kv_heads)
    writer.add_key_length(architecture.head_dim)
    writer.add_value_length(architecture.head_dim)
    writer.add_rope_dimension_count(architecture.head_dim)
    writer.add_layer_norm_rms_eps(architecture.norm_eps)
    writer.add_rope_freq_base(architecture.rope.theta)
    if architecture.rope.kind == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(architecture.rope.factor)


def _names(architecture: Architecture) -> Any:
    from gguf import MODEL_ARCH, get_tensor_name_map

    family = MODEL_ARCH[FAMILIES[architecture.family].upper()]
    return get_tensor_name_map(family, architecture.layers)


def _name(names: Any, theirs: str) -> str:
    found = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise ModelError(f"llama.cpp has no tensor for `{theirs}`", hint="Export without `--gguf`")
    return str(found)


def _is_unused(name: str, architecture: Architecture) -> bool:
    """Tensors of a file that its architecture never reads."""
    tied = architecture.tied_embeddings and name == "lm_head.weight"
    return tied or name.endswith("rotary_emb.inv_freq")


def _rotated(weight: Weight, name: str, architecture: Architecture) -> Weight:
    """Put the two numbers of each rotation side by side where llama.cpp expects that."""
    if FAMILIES[architecture.family] != "llama" or not name.endswith(ROTATED):
        return weight
    heads, shape = architecture.heads if "q_proj" in name else architecture.kv_heads, weight.shape

    def read() -> Tensor:
        halves = weight.read().reshape(heads, 2, shape[0] // heads // 2, *shape[1:])
        return halves.swapaxes(1, 2).reshape(shape)

    return Weight(shape, read)


def rope_factors(architecture: Architecture) -> list[float]:
    """What each frequency of Llama 3.1's scaled RoPE is divided by."""
    rope, dim = architecture.rope, architecture.head_dim
    return [_divisor(rope, rope.theta ** (-at / dim)) for at in range(0, dim, 2)]


def _divisor(rope: Rope, frequency: float) -> float:
    turns = rope.original_length * frequency / (2 * math.pi)
    if turns > rope.high_freq_factor:
        return 1.0
    if turns < rope.low_freq_factor:
        return rope.factor
    span = rope.high_freq_factor - rope.low_freq_factor
    share = (turns - rope.low_freq_factor) / span
    return 1 / ((1 - share) / rope.factor + share)


@dataclass(frozen=True)
class _Stored:
    """How one tensor is stored."""

    kind: Any
    bytes: int


def _write(writer: Any, path: Path, weights: dict[str, Weight], kind: str) -> None:
    stored = {name: _stored(name, weight.shape, kind) for name, weight in weights.items()}
    for name, weight in weights.items():
        one = stored[name]
        # Of a type that numpy has not, only `raw_dtype` counts.
        form = np.dtype(np.float32)
        writer.add_tensor_info(name, tuple(weight.shape), form, one.bytes, raw_dtype=one.kind)
    writer.write_header_to_file(path)
    try:
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, values in _values(weights, stored):
            _check_finite(name, values, kind)
            writer.write_tensor_data(values)
    finally:
        writer.close()


def _stored(name: str, shape: torch.Size, kind: str) -> _Stored:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    # Norms and biases are few and matter; embeddings suffer most from 4 and 5 bits.
    wanted = kind.upper()
    if len(shape) == 1:
        wanted = "F32"
    elif name in ("token_embd.weight", "output.weight") and wanted.startswith(("Q4", "Q5")):
        wanted = "Q8_0"
    block, _ = GGML_QUANT_SIZES[GGMLQuantizationType[wanted]]
    if shape[-1] % block:
        wanted = "F16"
    found = GGMLQuantizationType[wanted]
    block, size = GGML_QUANT_SIZES[found]
    return _Stored(found, shape.numel() // block * size)


def _values(
    weights: dict[str, Weight], stored: dict[str, _Stored]
) -> Iterator[tuple[str, NDArray[Any]]]:
    from gguf.quants import quantize

    for name in list(weights):
        values = weights.pop(name).read().float().contiguous().numpy()
        with np.errstate(over="ignore"):  # `_check_finite` names the tensor
            stored_values = quantize(values, stored[name].kind)
        yield name, stored_values


def _check_finite(name: str, values: NDArray[Any], kind: str) -> None:
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise ModelError(
            f"`{name}` has values that `{kind}` cannot hold", hint="Use `--gguf bf16` or `f32`"
        )


def _list(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)
