"""Compares the learner on a CUDA GPU with transformers + peft: one forward and backward pass.

`python bench/learner.py --cuda` runs every case and stack in a separate process, so that neither
stack affects the other's memory, and writes the table to `bench/results/`.
"""

import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.report import Table, write_report
from bench.shapes import QWEN3_4B, QWEN25_7B, Config, random_policy, random_row, weighted_loss
from kit.types import Json
from trainer.learner.gradient import row_logprobs

GIB = 2**30
ROOT = Path(__file__).parents[1]


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
    """Sequences in one forward pass of the baseline; 0 means all."""
    limit_gib: float | None = None
    """Memory that our learner may use; None means all."""
    fp8: bool = False
    """Whether our learner stores the frozen weights in fp8."""

    @property
    def tokens(self) -> int:
        """The number of tokens without sharing."""
        return self.groups * self.size * (self.prompt + self.completion)


CASES = {
    "7b-16x512": Case("7B, 16 sequences of 512, all trained", QWEN25_7B, 8, 16, 1, 1, 511),
    "7b-16x512-half": Case("7B, 16 sequences of 256 + 256", QWEN25_7B, 8, 16, 1, 256, 256),
    "7b-1x8192": Case("7B, one sequence of 8,192, all trained", QWEN25_7B, 8, 1, 1, 1, 8191),
    "7b-1x8192-35": Case("the same within 35 GiB", QWEN25_7B, 8, 1, 1, 1, 8191, limit_gib=35),
    "7b-group": Case("7B, group of 16, 2,048 + 256", QWEN25_7B, 8, 1, 16, 2048, 256, micro=4),
    "7b-16x512-fp8": Case("the first, base in fp8", QWEN25_7B, 8, 16, 1, 1, 511, fp8=True),
    "4b-1x16384": Case("4B (Qwen3), one sequence of 16,384", QWEN3_4B, 16, 1, 1, 1, 16_383),
}


def measure(step: Callable[[], Any], *, warm: int = 3, repeats: int = 7) -> dict[str, float]:
    """The median, in seconds, and the spread of consecutive steps, and their peak memory."""
    for _ in range(warm):
        step()
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    seconds = [start.elapsed_time(end) / 1000 for start, end in itertools.pairwise(marks)]
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
    """Number of weights that are multiplied with every token, including the head."""
    dim, ffn, heads = config["hidden_size"], config["intermediate_size"], config
    head_dim = config.get("head_dim") or dim // heads["num_attention_heads"]
    q, kv = heads["num_attention_heads"] * head_dim, heads["num_key_value_heads"] * head_dim
    layer = dim * (2 * q + 2 * kv) + 3 * dim * ffn
    return int(config["num_hidden_layers"] * layer + config["vocab_size"] * dim)


def ours(case: Case, *, limit_gib: float | None = None) -> Json:
    """Measure our learner's forward and backward pass over the case's packed row."""
    device = torch.device("cuda")
    limit = None if limit_gib is None else int(limit_gib * GIB)
    policy = random_policy(case.config, case.rank, device, limit=limit, fp8=case.fp8)
    row = random_row(case.groups, case.size, case.prompt, case.completion, device)
    parameters = list(policy.trainable().values())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        logprobs, _ = row_logprobs(policy, row)
        weighted_loss(logprobs).backward()

    found = measure(step)
    found["tokens_per_second"] = case.tokens / found["seconds"]
    found["physical_per_second"] = len(row.tokens) / found["seconds"]
    return found


def in_process(arguments: list[str], environment: dict[str, str]) -> Json:
    """Run another Python and return the JSON of its last line, or its error if it fails."""
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["?"])[-1][:200]}
    found: Json = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def baseline(case: Case, peft_path: str) -> Json:
    """Measure transformers + peft, without checkpointing if that fits, because it is fastest."""
    description = {
        "config": case.config,
        "rank": case.rank,
        "sequences": case.groups * case.size,
        "prompt": case.prompt,
        "completion": case.completion,
        "micro": case.micro,
    }
    environment = {**os.environ, "PYTHONPATH": peft_path}
    arguments = ["bench/baseline_peft.py", json.dumps(description)]
    found = in_process(arguments, environment)
    if "error" in found:
        found = in_process([*arguments, "--checkpointing"], environment) | {"checkpointing": True}
    return found


def run_all(peft_path: str, wanted: list[str]) -> None:
    """Run every case in separate processes and write the table to `bench/results/`."""
    ceiling = matmul_ceiling()
    torch.cuda.empty_cache()
    heads = ["work, forward + backward", "transformers + peft", "GiB", "ours", "GiB"]
    table = Table([*heads, "ratio", "of the matmul ceiling"])
    for name in wanted:
        case = CASES[name]
        mine = in_process(["-m", "bench.learner_cuda", name], dict(os.environ))
        print(name, "ours", json.dumps(mine), flush=True)
        theirs = {} if case.limit_gib or case.fp8 else baseline(case, peft_path)
        print(name, "transformers + peft", json.dumps(theirs), flush=True)
        table.add(cells(case, mine, theirs, ceiling))
    print(table)
    about = (
        "The learner's forward and backward pass in bf16, with a LoRA on every linear layer, "
        "compared with transformers + peft (sdpa, without checkpointing where that fits; `*`: with "
        "it), both measured in this run. Tokens per second are counted without sharing. The "
        "ceiling is 4 FLOP per multiplied weight and token read, at "
        f"{ceiling:.0f} TFLOP/s, the speed of a bf16 product of 8,192 cubed in this run. Attention "
        "is not counted"
    )
    name = torch.cuda.get_device_name()
    packages = ("torch", "triton", "torchtune", "transformers")
    load = os.getloadavg()[0]
    write_report("learner_cuda", f"On one {name}. {about}", table, load, packages=packages)


def cells(case: Case, mine: Json, theirs: Json, ceiling: float) -> list[str]:
    def number(found: Json, key: str, form: str) -> str:
        star = "*" if found.get("checkpointing") else ""
        return f"{found[key]:{form}}{star}" if key in found else found.get("error", "-")

    speed, other = mine.get("tokens_per_second", 0.0), theirs.get("tokens_per_second")
    flops = 4 * matmul_parameters(case.config) * mine.get("physical_per_second", 0.0)
    return [
        case.title,
        number(theirs, "tokens_per_second", ",.0f"),
        number(theirs, "peak_gib", ".1f"),
        number(mine, "tokens_per_second", ",.0f"),
        number(mine, "peak_gib", ".1f"),
        f"{speed / other:.2f}x" if other else "-",
        f"{flops / ceiling / 1e12:.0%}",
    ]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    chosen = CASES[sys.argv[1]]
    print(json.dumps(ours(chosen, limit_gib=chosen.limit_gib)))
