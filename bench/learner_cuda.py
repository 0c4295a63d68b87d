"""The learner on a CUDA card against transformers + peft: forward and backward, one process each.

`python bench/learner.py --cuda` runs every case below in a process of its own, so that no stack
inherits the other's memory, and writes the table to `bench/results/`.
"""

import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.shapes import QWEN3_4B, QWEN25_7B, Config, random_policy, random_row, weighted_loss
from trainer.learner.gradient import row_logprobs

GIB = 2**30


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    title: str
    config: Config
    rank: int
    groups: int
    size: int
    prompt: int
    completion: int
    micro: int = 0
    """Sequences in one forward pass of the baseline; 0 is all."""

    @property
    def tokens(self) -> int:
        """Unshared tokens: what the same work is without sharing."""
        return self.groups * self.size * (self.prompt + self.completion)


CASES = {
    "7b-16x512": Case("7B, 16 sequences of 512, all trained", QWEN25_7B, 8, 16, 1, 1, 511),
    "7b-16x512-half": Case("7B, 16 sequences of 256 + 256", QWEN25_7B, 8, 16, 1, 256, 256),
    "7b-1x8192": Case("7B, one sequence of 8,192, all trained", QWEN25_7B, 8, 1, 1, 1, 8191),
    "7b-group": Case("7B, group of 16, 2,048 + 256", QWEN25_7B, 8, 1, 16, 2048, 256, micro=4),
    "4b-1x16384": Case("4B (Qwen3), one sequence of 16,384", QWEN3_4B, 16, 1, 1, 1, 16_383),
}


def measure(step: Callable[[], Any], *, warm: int = 3, repeats: int = 7) -> dict[str, float]:
    """Median seconds of a step, and the peak memory of one."""
    for _ in range(warm):
        step()
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1000)
    return {
        "seconds": statistics.median(seconds),
        "spread": max(seconds) - min(seconds),
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
    }


def matmul_ceiling(size: int = 8192) -> float:
    """TFLOP/s of one large bf16 product of random matrices."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    found = measure(lambda: [a @ b for _ in range(10)], warm=2, repeats=5)
    return 10 * 2 * size**3 / found["seconds"] / 1e12


def matmul_parameters(config: Config) -> int:
    """Weights that are multiplied with every token, the head included."""
    dim, ffn, heads = config["hidden_size"], config["intermediate_size"], config
    head_dim = config.get("head_dim") or dim // heads["num_attention_heads"]
    q, kv = heads["num_attention_heads"] * head_dim, heads["num_key_value_heads"] * head_dim
    layer = dim * (2 * q + 2 * kv) + 3 * dim * ffn
    return int(config["num_hidden_layers"] * layer + config["vocab_size"] * dim)


def ours(case: Case, *, budget: float = 1.0, chunk: int = 4096) -> dict[str, float]:
    """Our learner's forward and backward pass over the case's packed row."""
    device = torch.device("cuda")
    policy = random_policy(case.config, case.rank, device)
    assert policy.fast
    policy.fast.budget = budget
    policy.activation_checkpointing = budget == 0
    row = random_row(case.groups, case.size, case.prompt, case.completion, device)
    parameters = list(policy.trainable().values())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        logprobs, _ = row_logprobs(policy, row, chunk=chunk)
        weighted_loss(logprobs).backward()

    found = measure(step)
    found["tokens_per_second"] = case.tokens / found["seconds"]
    found["physical_per_second"] = len(row.tokens) / found["seconds"]
    return found
