"""LoRAs in PEFT form for tests."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from trainer.base_model.tiny_random import CONFIG
from trainer.config import LoraConfig
from trainer.policy.lora import peft_config


def write_lora(directory: Path, *, seed: int, rank: int = 4) -> Path:
    """Write a LoRA in PEFT form that changes every linear layer."""
    random = np.random.RandomState(seed)
    dim, ffn = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    kv_dim = CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
    shapes = {
        **{f"self_attn.{name}": (dim, dim) for name in ("q_proj", "o_proj")},
        **{f"self_attn.{name}": (dim, kv_dim) for name in ("k_proj", "v_proj")},
        **{f"mlp.{name}": (dim, ffn) for name in ("gate_proj", "up_proj")},
        "mlp.down_proj": (ffn, dim),
    }
    tensors = {}
    for layer in range(CONFIG["num_hidden_layers"]):
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
