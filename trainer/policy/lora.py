"""A policy's LoRA: its initialisation, its PEFT names and `adapter_config.json`. No TorchTune."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config import LoraConfig
from trainer.errors import CheckpointError

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
    """Set fresh LoRA weights: A random (Kaiming, as in PEFT), B zero, so nothing changes yet."""
    generator = torch.Generator().manual_seed(seed)
    for module in lora_modules(policy).values():
        at = device or module.lora_a.weight.device
        bound = module.in_dim**-0.5
        a = torch.empty(module.rank, module.in_dim).uniform_(-bound, bound, generator=generator)
        b = torch.zeros(module.out_dim, module.rank)
        module.lora_a.weight = nn.Parameter(a.to(at))
        module.lora_b.weight = nn.Parameter(b.to(at))


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
    config = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))
    return LoraConfig(
        rank=config["r"], alpha=config["lora_alpha"], targets=tuple(config["target_modules"])
    )
