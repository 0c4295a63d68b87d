"""`trainer export`: merge a checkpoint into its base model and write a Hugging Face directory."""

import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from trainer import checkpoint
from trainer.base_model.resolve import resolve
from trainer.errors import CheckpointError, Conflict
from trainer.learner.state import ADAPTER, ADAPTER_CONFIG, FULL, read_tensors
from trainer.policy.lora import read_lora_config
from trainer.policy.weights import stored_tensors

SHARD_BYTES = 4 << 30
# Files of a Hugging Face model directory other than its weights.
TEXTS = ("*.json", "*.jinja", "*.model", "*.txt")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export(
    checkpoint_path: Path, output: Path, *, base_model: str | None = None, dtype: str = "bfloat16"
) -> Path:
    """Write the model of a checkpoint to the new directory `output`, and return it.

    `base_model` defaults to the name in the checkpoint; give a directory if, for example, another
    machine trained it from a hub id. `dtype` is `float32`, `bfloat16` or `float16`; LoRA and
    weights are added in fp32 and rounded once.
    """
    manifest = checkpoint.verify(checkpoint_path)
    if output.exists():
        raise Conflict(f"`{output}` already exists", hint="Choose a new directory")
    directory = resolve(base_model or manifest["base_model"])
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        _copy_texts(directory, temporary, dtype)
        _write_shards(merged(directory, checkpoint_path), temporary, DTYPES[dtype])
        temporary.chmod(0o755)
        temporary.rename(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return output


def merged(directory: Path, checkpoint_path: Path) -> dict[str, Tensor]:
    """Return the base model's tensors; those with a LoRA are in fp32, with the LoRA added."""
    tensors = stored_tensors(directory)
    if (checkpoint_path / FULL).is_file():
        return tensors | read_tensors(checkpoint_path / FULL)
    lora = read_lora_config(checkpoint_path)
    trained = read_tensors(checkpoint_path / ADAPTER)
    for name, low in trained.items():
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        high = trained[name.replace("lora_A", "lora_B")]
        weight = tensors.get(f"{module}.weight")
        if weight is None or weight.shape != (high.shape[0], low.shape[1]):
            raise CheckpointError(
                f"The LoRA in `{checkpoint_path / ADAPTER_CONFIG}` does not fit `{directory}`",
                hint="Set `--base-model` to the model that it was trained from",
            )
        delta = lora.alpha / lora.rank * (high.float() @ low.float())
        tensors[f"{module}.weight"] = weight.float() + delta
    return tensors


def _copy_texts(source: Path, target: Path, dtype: str) -> None:
    for pattern in TEXTS:
        for path in source.glob(pattern):
            if not path.name.endswith(".index.json"):
                shutil.copyfile(path, target / path.name)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config.pop("dtype", None)
    config["torch_dtype"] = dtype
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_shards(tensors: dict[str, Tensor], directory: Path, dtype: torch.dtype) -> None:
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        bytes_needed = tensor.numel() * dtype.itemsize
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
        shard = {name: tensors[name].to(dtype).contiguous() for name in names}
        save_file(shard, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
