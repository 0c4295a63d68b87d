"""Model shapes, random policies and random rows for the GPU benchmarks."""

import random
from typing import Any

import torch
from torch import Tensor, nn

from trainer.base_model.architecture import parse_architecture
from trainer.config import LoraConfig
from trainer.learner.pack import Row, pack
from trainer.learner.prefix_tree import Sample
from trainer.policy.attention import inverse_frequencies
from trainer.policy.compiled import CompiledLayers
from trainer.policy.model import Policy, assemble, init_lora

Config = dict[str, Any]

QWEN25_7B: Config = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 152_064,
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QWEN3_4B: Config = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151_936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def random_policy(
    config: Config,
    rank: int,
    device: torch.device,
    *,
    compiled: bool = True,
    limit: int | None = None,
    fp8: bool = False,
) -> Policy:
    """A policy of the given shape in bf16 with random weights and a non-zero LoRA.

    With `limit` it uses at most that many bytes of memory.
    """
    architecture = parse_architecture(config)
    lora = LoraConfig(rank=rank, alpha=2.0 * rank)
    with torch.device("meta"):
        policy = assemble(architecture, lora)
    policy.architecture, policy.lora = architecture, lora
    policy.frequencies = inverse_frequencies(architecture.rope, architecture.head_dim, device)
    generator = torch.Generator(device).manual_seed(0)
    state = {}
    for name, parameter in policy.named_parameters():
        if name.endswith(".scale"):
            state[name] = torch.ones(parameter.shape, device=device)
        elif ".lora_" not in name:
            value = torch.empty(parameter.shape, device=device, dtype=torch.bfloat16)
            state[name] = value.normal_(std=0.02, generator=generator)
    policy.load_state_dict(state, strict=False, assign=True)
    del state  # or the weights that are joined below would be held twice
    policy.requires_grad_(False)
    init_lora(policy, 0, device=device)
    for name, parameter in policy.trainable().items():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.01)
    policy.eval()
    if compiled:
        free = None if limit is None else lambda device: limit - torch.cuda.memory_allocated(device)
        policy.compiled = CompiledLayers(policy.layers, policy.architecture, free=free, fp8=fp8)
    return policy


def random_row(
    groups: int, size: int, prompt: int, completion: int, device: torch.device, seed: int = 0
) -> Row:
    """One packed row: `size` completions of each of `groups` prompts, each prompt stored once."""
    chance = random.Random(seed)
    samples = []
    for group in range(groups):
        shared = [chance.randrange(1000, 100_000) for _ in range(prompt)]
        for member in range(size):
            own = [chance.randrange(1000, 100_000) for _ in range(completion)]
            samples.append(
                Sample(
                    ids=shared + own,
                    mask=[False] * prompt + [True] * completion,
                    logprobs=[-1.0] * (prompt + completion),
                    advantage=1.0,
                    weight=1.0,
                    group=group,
                    trajectory=group * size + member,
                )
            )
    (row,) = pack(samples, length=groups * (prompt + size * completion))
    return row.to(device)


def weighted_loss(logprobs: Tensor) -> Tensor:
    """A loss with a different gradient for every token."""
    return (logprobs * torch.linspace(-1, 1, len(logprobs), device=logprobs.device)).mean()
