"""Loads the policy that a run trains, in the form that its device is fastest with."""

from pathlib import Path

import torch

from trainer.config import LoraConfig
from trainer.errors import Unsupported
from trainer.learner.world import World
from trainer.policy.compiled import CompiledLayers
from trainer.policy.model import Policy, load_model

FP8_CAPABILITY = (8, 9)  # Ada and Hopper; an A100 has no products in fp8


def load_policy(
    directory: Path,
    lora: LoraConfig | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    world: World,
    fp8: bool,
) -> Policy:
    if fp8:
        _check_fp8(lora, dtype, device, world)
    policy = load_model(directory, lora=lora, dtype=dtype, device=device)
    # Sharded weights are gathered by the layers' own forward passes, which `compiled` goes round.
    if device.type == "cuda" and world.size == 1:
        policy.compiled = CompiledLayers(policy.layers, policy.architecture, fp8=fp8)
    return policy


def _check_fp8(
    lora: LoraConfig | None, dtype: torch.dtype, device: torch.device, world: World
) -> None:
    if device.type != "cuda" or world.size > 1 or lora is None:
        raise Unsupported(
            "`quantization` is `fp8`, which trains a LoRA in one process on a CUDA card",
            hint="Leave it out, or set `learner_devices` to one card",
        )
    if torch.cuda.get_device_capability(device) < FP8_CAPABILITY or dtype != torch.bfloat16:
        raise Unsupported(
            f"`quantization` is `fp8`, which `{torch.cuda.get_device_name(device)}` with weights "
            f"in `{dtype}` has not",
            hint="Leave it out, or use an L4, L40S, H100 or newer",
        )
