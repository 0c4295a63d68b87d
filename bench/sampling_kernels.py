"""Compares our kernels that sample tokens and compute logprobs with vLLM's, on this GPU.

    python bench/sampling_kernels.py [--write]      # where vLLM and the GPU are

The table shows the microseconds that a batch of requests takes for each, and how far the logprobs
differ.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "trainer/engines/in_vllm")]

from bench.report import Table, write_report  # noqa: E402

WORDS = 151_936  # of Qwen2.5 and Qwen3


def microseconds(run: Callable[[], Any]) -> float:
    """Return the median time of a call, other than its launch."""
    for _ in range(3):  # compiles
        run()
    times = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)  # launches what follows meanwhile
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return statistics.median(times)


def measure(requests: int) -> list[str]:
    import sampling_kernel
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    torch.manual_seed(0)
    logits = 3 * torch.randn(requests, WORDS, device="cuda", dtype=torch.bfloat16)
    numbers = torch.arange(requests, dtype=torch.int32, device="cuda")
    temperatures = torch.ones(requests, device="cuda")
    seeds = torch.randint(1 << 60, (requests,), device="cuda")
    positions = torch.randint(1000, (requests,), device="cuda")
    given = (logits, numbers, temperatures, seeds, positions)
    tokens = torch.randint(WORDS, (requests, 1), device="cuda")
    off = (sampling_kernel.logprobs(logits, tokens) - compute_token_logprobs(logits, tokens)).abs()
    times = [
        microseconds(lambda: gumbel_sample(*given, apply_temperature=False)),
        microseconds(lambda: sampling_kernel.sample(*given)),
        microseconds(lambda: compute_token_logprobs(logits, tokens)),
        microseconds(lambda: sampling_kernel.logprobs(logits, tokens)),
    ]
    return [str(requests), *(f"{time:.0f}" for time in times), f"{float(off.max()):.1e}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--write", action="store_true", help="write bench/results/")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    table = Table(
        ["requests", "vLLM samples us", "ours us", "vLLM's logprobs us", "ours us", "difference"]
    )
    for requests in (8, 64, 256, 512, 1024):
        table.add(measure(requests))
    what = f"Sampling from {WORDS:,} words in bf16 on an {torch.cuda.get_device_name()}"
    print(f"{what}\n\n{table}")
    if arguments.write:
        write_report("sampling_kernels", what, table, load, packages=("torch", "triton", "vllm"))


if __name__ == "__main__":
    main()
