"""LoRAs in PEFT form for tests."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from kit.types import Json
from trainer.base_model.tiny_random import CONFIG
from trainer.config import LoraConfig
from trainer.policy.lora import peft_config


def write_lora(directory: Path, *, seed: int, rank: int = 4, shape: Json = CONFIG) -> Path:
    """Write a LoRA in PEFT form that changes every linear layer of a model of this shape."""
    random = np.random.RandomState(seed)
    dim, ffn = shape["hidden_size"], shape["intermediate_size"]
    q_dim, kv_dim = (
        shape[f"num_{heads}_heads"] * shape["head_dim"] for heads in ("attention", "key_value")
    )
    shapes = {
        "self_attn.q_proj": (dim, q_dim),
        "self_attn.o_proj": (q_dim, dim),
        **{f"self_attn.{name}": (dim, kv_dim) for name in ("k_proj", "v_proj")},
        **{f"mlp.{name}": (dim, ffn) for name in ("gate_proj", "up_proj")},
        "mlp.down_proj": (ffn, dim),
    }
    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        for name, (inputs, outputs) in shapes.items():
            at = f"base_model.model.model.layers.{layer}.{name}"
            a, b = random.standard_normal((rank, inputs)), random.standard_normal((outputs, rank))
            tensors[f"{at}.lora_A.weight"] = (a * 0.05).astype(np.float32)
            tensors[f"{at}.lora_B.weight"] = (b * 0.05).astype(np.float32)
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = peft_config(LoraConfig(rank=rank, alpha=8), "tiny-random")
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
