"""A checkpoint in Hugging Face's form: merged into its base model, or the LoRA alone."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from kit.manifest import MANIFEST
from trainer.errors import CheckpointError
from trainer.learner.state import ADAPTER, ADAPTER_CONFIG, FULL, read_tensors
from trainer.policy.lora import read_lora_config
from trainer.policy.weights import stored_tensors

SHARD_BYTES = 4 << 30
# Files of a Hugging Face model directory other than its weights.
TEMPLATES = ("*.jinja", "additional_chat_templates/*.jinja")
TEXTS = ("*.json", *TEMPLATES, "*.model", "*.txt")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Weight:
    """A weight that is computed each time it is read: in fp32 all of them take much memory."""

    shape: torch.Size
    read: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> "Weight":
        return cls(tensor.shape, lambda: tensor)


def write_merged(directory: Path, checkpoint_path: Path, output: Path, dtype: str) -> None:
    """Write a checkpoint merged into the base model in `directory` as a Hugging Face model."""
    copy_texts(directory, output)
    _set_dtype(output / "config.json", dtype)
    _write_shards(merged(directory, checkpoint_path), output, DTYPES[dtype])


def write_lora(directory: Path, checkpoint_path: Path, output: Path) -> None:
    """Copy the LoRA of a checkpoint without its optimizer's state, in PEFT's form."""
    lora_tensors(checkpoint_path)  # raises without one
    for name in (ADAPTER, ADAPTER_CONFIG):
        shutil.copyfile(checkpoint_path / name, output / name)
    copy_texts(directory, output, ("tokenizer*.json", "special_tokens_map.json", *TEMPLATES))


def lora_tensors(checkpoint_path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint's LoRA, by PEFT name."""
    if (checkpoint_path / FULL).is_file():
        raise CheckpointError(
            f"The checkpoint `{checkpoint_path}` has no LoRA: all weights were trained",
            hint="Export it without `--lora`",
        )
    return read_tensors(checkpoint_path / ADAPTER)


def merged(directory: Path, checkpoint_path: Path) -> dict[str, Weight]:
    """Return the base model's weights; those with a LoRA are in fp32, with the LoRA added."""
    tensors = stored_tensors(directory)
    if (checkpoint_path / FULL).is_file():
        tensors |= read_tensors(checkpoint_path / FULL)
        return {name: Weight.of(tensor) for name, tensor in tensors.items()}
    lora = read_lora_config(checkpoint_path)
    trained = lora_tensors(checkpoint_path)
    weights = {name: Weight.of(tensor) for name, tensor in tensors.items()}
    for name, low in trained.items():
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        high = trained[name.replace("lora_A", "lora_B")]
        base = tensors.get(f"{module}.weight")
        if base is None or base.shape != (high.shape[0], low.shape[1]):
            raise CheckpointError(
                f"The LoRA in `{checkpoint_path / ADAPTER_CONFIG}` does not fit `{directory}`",
                hint="Set `--base-model` to the model that it was trained from",
            )
        add = partial(_add, base, low, high, lora.alpha / lora.rank)
        weights[f"{module}.weight"] = replace(weights[f"{module}.weight"], read=add)
    return weights


def _add(base: Tensor, low: Tensor, high: Tensor, scale: float) -> Tensor:
    return base.float() + scale * (high.float() @ low.float())


def copy_texts(source: Path, target: Path, patterns: tuple[str, ...] = TEXTS) -> None:
    """Copy the files of a Hugging Face model that match `patterns`, but no index of weights."""
    for pattern in patterns:
        for path in source.glob(pattern):
            if not path.name.endswith(".index.json") and path.name != MANIFEST:
                copy = target / path.relative_to(source)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, copy)


def _set_dtype(path: Path, dtype: str) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("dtype", None)
    config["torch_dtype"] = dtype
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_shards(weights: dict[str, Weight], directory: Path, dtype: torch.dtype) -> None:
    shards: list[list[str]] = [[]]
    size = 0
    for name, weight in weights.items():
        bytes_needed = weight.shape.numel() * dtype.itemsize
        if shards[-1] and size + bytes_needed > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += bytes_needed
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        # Convert one shard at a time, so that a large model needs little memory.
        shard = {name: weights[name].read().to(dtype).contiguous() for name in names}
        save_file(shard, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
