"""A policy's LoRA: its initialisation, its PEFT names and `adapter_config.json`. No TorchTune."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from trainer.base_model.architecture import Architecture
from trainer.base_model.json_files import read_object
from trainer.base_model.weight_files import expected_shapes
from trainer.config import LoraConfig
from trainer.errors import CheckpointError

DAMAGED = "Use the step before it, or pull it again"
# Hugging Face's name of a linear layer -> its path in TorchTune's layer.
LINEARS = {
    "q_proj": "attn.q_proj",
    "k_proj": "attn.k_proj",
    "v_proj": "attn.v_proj",
    "o_proj": "attn.output_proj",
    "gate_proj": "mlp.w1",
    "up_proj": "mlp.w3",
    "down_proj": "mlp.w2",
}


def lora_modules(policy: nn.Module) -> dict[str, Any]:
    """Every linear layer that has a LoRA, by its PEFT name."""
    found = {}
    for index, layer in enumerate(policy.get_submodule("layers").children()):
        for name, place in LINEARS.items():
            module = layer.get_submodule(place)
            if hasattr(module, "lora_a"):
                found[peft_name(index, name)] = module
    return found


def peft_name(layer: int, linear: str) -> str:
    """The PEFT name of `linear`, one of LINEARS, in a layer."""
    block = "self_attn" if LINEARS[linear].startswith("attn") else "mlp"
    return f"base_model.model.model.layers.{layer}.{block}.{linear}"


def init_lora(policy: nn.Module, seed: int, *, device: torch.device | None = None) -> None:
    """Give the policy a fresh LoRA."""
    fresh = fresh_lora(policy, seed)
    for name, module in lora_modules(policy).items():
        at = device or module.lora_a.weight.device
        module.lora_a.weight = nn.Parameter(fresh[f"{name}.lora_A.weight"].to(at))
        module.lora_b.weight = nn.Parameter(fresh[f"{name}.lora_B.weight"].to(at))


def fresh_lora(policy: nn.Module, seed: int) -> dict[str, Tensor]:
    """Fresh weights by PEFT name: A random (Kaiming, as in PEFT), B zero: nothing changes yet."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, module in lora_modules(policy).items():
        bound = module.in_dim**-0.5
        a = torch.empty(module.rank, module.in_dim).uniform_(-bound, bound, generator=generator)
        found[f"{name}.lora_A.weight"] = a
        found[f"{name}.lora_B.weight"] = torch.zeros(module.out_dim, module.rank)
    return found


def lora_parameters(policy: nn.Module) -> dict[str, nn.Parameter]:
    found = {}
    for name, module in lora_modules(policy).items():
        found[f"{name}.lora_A.weight"] = module.lora_a.weight
        found[f"{name}.lora_B.weight"] = module.lora_b.weight
    return found


def lora_state(policy: nn.Module) -> dict[str, Tensor]:
    """The LoRA tensors by PEFT name: the live tensors, not copies."""
    return {name: parameter.detach() for name, parameter in lora_parameters(policy).items()}


def load_lora(policy: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy `tensors`, by PEFT name, into the policy's LoRA."""
    parameters = lora_parameters(policy)
    wrong = sorted(parameters.keys() ^ tensors.keys()) or [
        name for name, tensor in tensors.items() if tensor.shape != parameters[name].shape
    ]
    if wrong:
        raise CheckpointError(
            f"The LoRA does not fit this model: `{wrong[0]}`",
            hint="It has another base model, rank or set of targets; start a new run",
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def peft_config(lora: LoraConfig, base_model: str) -> dict[str, Any]:
    """`adapter_config.json`, as PEFT and vLLM read it."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(lora.targets),
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
    }


def read_lora_config(directory: Path) -> LoraConfig:
    """Read the LoRA settings from `adapter_config.json` in `directory`."""
    path = directory / "adapter_config.json"
    config = read_object(path, CheckpointError, DAMAGED)
    try:
        return LoraConfig(
            rank=config["r"], alpha=config["lora_alpha"], targets=tuple(config["target_modules"])
        )
    except KeyError as exc:
        raise CheckpointError(f"`{path}` lacks {exc}", hint=DAMAGED) from exc
    except (TypeError, ValueError) as exc:  # pydantic's errors are ValueErrors
        faults: list[Any] = getattr(exc, "errors", list)()
        fault = f"`{'.'.join(map(str, faults[0]['loc']))}`: {faults[0]['msg']}" if faults else exc
        raise CheckpointError(f"`{path}` is no LoRA's config: {fault}", hint=DAMAGED) from exc


def read_lora(directory: Path, architecture: Architecture) -> tuple[LoraConfig, dict[str, Tensor]]:
    """Read the LoRA in `directory`, which must fit the base model. Layers may lack one."""
    config = read_lora_config(directory)
    path = directory / "adapter_model.safetensors"
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError, ValueError) as exc:
        raise CheckpointError(f"`{path}` cannot be read: {exc}", hint=DAMAGED) from exc
    bases = expected_shapes(architecture)
    shapes: dict[str, tuple[int, int]] = {}
    for layer in range(architecture.layers):
        for linear in LINEARS:
            name = peft_name(layer, linear)
            outputs, inputs = bases[f"{name.removeprefix('base_model.model.')}.weight"]
            shapes[f"{name}.lora_A.weight"] = config.rank, inputs
            shapes[f"{name}.lora_B.weight"] = outputs, config.rank
    for name, tensor in tensors.items():
        other = (
            name.replace(".lora_A.", ".lora_B.")
            if ".lora_A." in name
            else name.replace(".lora_B.", ".lora_A.")
        )
        if name not in shapes:
            raise CheckpointError(f"`{path}` holds `{name}`, which does not fit", hint=DAMAGED)
        if other not in tensors:
            raise CheckpointError(f"`{path}` lacks `{other}`", hint=DAMAGED)
        if tuple(tensor.shape) != shapes[name] or not tensor.is_floating_point():
            raise CheckpointError(
                f"`{name}` in `{path}` has shape `{list(tensor.shape)}` and type `{tensor.dtype}`, "
                f"not `{list(shapes[name])}` of floats",
                hint=DAMAGED,
            )
    if not tensors:
        raise CheckpointError(f"`{path}` holds no tensors", hint=DAMAGED)
    return config, tensors
