"""Logits from transformers and peft for `test_parity.py`, run in the environment of scripts/parity.

parity_reference.py models DIRECTORY      create random models of every family, with their logits
parity_reference.py adapters DIRECTORY    logits of every model with a LoRA, and of its export
"""

import sys
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SMALL = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "llama2": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 4}),
    "llama3": (
        LlamaForCausalLM,
        LlamaConfig,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    ),
    "llama3_1": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3}),
    "llama3_2": (
        LlamaForCausalLM,
        LlamaConfig,
        {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
    ),
    "llama_biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 64, "tie_word_embeddings": False}),
    "mistral": (MistralForCausalLM, MistralConfig, {"head_dim": 32, "sliding_window": None}),
}


def make_models(directory: Path) -> None:
    torch.manual_seed(0)
    for name, (model_class, config_class, settings) in FAMILIES.items():
        model = model_class(config_class(**{**SMALL, **settings}))
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases start constant, which would test nothing
                torch.nn.init.normal_(parameter, mean=0.5, std=0.5)
        model.save_pretrained(directory / name)
        save_file({"logits": logits(model, tokens(320))}, directory / name / "expected.bin")
    for path in directory.glob("*/only_logits"):
        model = AutoModelForCausalLM.from_pretrained(path.read_text(), dtype=torch.float32)
        save_file({"logits": logits(model, tokens(49152))}, path.parent / "expected.bin")


def run_adapters(directory: Path) -> None:
    for path in sorted(directory.glob("*/base")):
        base = AutoModelForCausalLM.from_pretrained(path.read_text(), dtype=torch.float32)
        given = load_file(path.parent / "tokens.bin")["tokens"]
        merged = AutoModelForCausalLM.from_pretrained(path.parent / "merged", dtype=torch.float32)
        found = {"merged": logits(merged, given)}
        found["adapter"] = logits(PeftModel.from_pretrained(base, path.parent / "adapter"), given)
        save_file(found, path.parent / "found.bin")


def tokens(vocabulary: int) -> torch.Tensor:
    return torch.arange(2 * 96).view(2, 96) * 7919 % vocabulary


@torch.no_grad()
def logits(model: torch.nn.Module, given: torch.Tensor) -> torch.Tensor:
    return model.eval()(given).logits.contiguous()


if __name__ == "__main__":
    {"models": make_models, "adapters": run_adapters}[sys.argv[1]](Path(sys.argv[2]))
