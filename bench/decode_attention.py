"""Compares our attention of decoding requests with vLLM's FlashAttention 3, on this GPU.

    python bench/decode_attention.py [--write] [--sweep]      # where vLLM and a Hopper GPU are

The table shows the microseconds of one layer's attention while requests add a token each, with
caches in bf16 and in fp8, how fast ours reads the cache, and how far the results differ. `--sweep`
times other tiles of our kernel instead.
"""

import argparse
import itertools
import os
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "trainer/engines/in_vllm")]

from bench.report import Table, write_report  # noqa: E402

PAGE = 16  # tokens, as in vLLM


@dataclass(frozen=True)
class Case:
    title: str
    lengths: list[int]
    heads: int = 32
    kv_heads: int = 8
    size: int = 128


def between(count: int, shortest: int, longest: int) -> list[int]:
    draw = random.Random(0)
    return [draw.randint(shortest, longest) for _ in range(count)]


CASES = [
    Case("4B, 1,024 requests of 60 to 560 tokens", between(1024, 60, 560)),
    Case("4B, 512 requests of 300 to 600 tokens", between(512, 300, 600)),
    Case("4B, 64 requests of 300 to 600 tokens", between(64, 300, 600)),
    Case("4B, 8 requests of 300 to 600 tokens", between(8, 300, 600)),
    Case("4B, 128 requests of 2,000 to 8,000 tokens", between(128, 2000, 8000)),
    Case("4B, 511 short requests and one of 30,000", [*between(511, 300, 600), 30_000]),
    Case("4B, 1 request of 30,000 tokens", [30_000]),
    Case("7B, 256 requests of 300 to 600 tokens", between(256, 300, 600), heads=28, kv_heads=4),
]


def microseconds(run: Callable[[], None], repeats: int = 20) -> float:
    """Return the median time in a CUDA graph."""
    for _ in range(3):  # compiles
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    times = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / repeats)
    return statistics.median(times)


def measure(case: Case, dtype: torch.dtype) -> list[str]:
    from decode_kernel import attend
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    torch.manual_seed(0)
    count, longest, size = len(case.lengths), max(case.lengths), case.size
    fp8 = dtype != torch.bfloat16
    pages = [-(-length // PAGE) for length in case.lengths]
    numbers = torch.randperm(sum(pages)).int().split(pages)
    table = torch.zeros(count, max(pages), dtype=torch.int32)
    for row, own in zip(table, numbers, strict=True):
        row[: len(own)] = own
    table = table.cuda()
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device="cuda")
    # As vLLM stores it: heads beside each other, keys beside values.
    stored = torch.randn(sum(pages), PAGE, case.kv_heads, 2 * size, device="cuda").to(dtype)
    q = torch.randn(count, case.heads, size, device="cuda", dtype=torch.bfloat16).to(dtype)
    ours, theirs = (torch.empty(q.shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    one = torch.ones(1, device="cuda")
    starts = torch.arange(count + 1, device="cuda", dtype=torch.int32)
    scales = {f"{name}_descale": one.expand(count, case.kv_heads) for name in "qkv"} if fp8 else {}
    keys, values = stored.split(size, dim=-1)
    schedule = get_scheduler_metadata(
        batch_size=count, max_seqlen_q=1, max_seqlen_k=longest, num_heads_q=case.heads,
        num_heads_kv=case.kv_heads, headdim=size, cache_seqlens=lengths, qkv_dtype=dtype,
        cu_seqlens_q=starts, page_size=PAGE, causal=True, window_size=(-1, -1), num_splits=32,
    )  # fmt: skip

    def flash() -> None:
        flash_attn_varlen_func(
            q=q, k=keys, v=values, out=theirs, cu_seqlens_q=starts, max_seqlen_q=1,
            seqused_k=lengths, max_seqlen_k=longest, softmax_scale=size**-0.5, causal=True,
            block_table=table, fa_version=3, scheduler_metadata=schedule, num_splits=32, **scales,
        )  # fmt: skip

    def mine() -> None:
        cache: Tensor = stored.transpose(1, 2)
        attend(q, cache, ours, table, lengths, size**-0.5, (one, one, one), 40_960)

    before, after = microseconds(flash), microseconds(mine)
    read = sum(case.lengths) * case.kv_heads * 2 * size * stored.element_size()
    off = float((ours - theirs).abs().max())
    name = "fp8" if fp8 else "bf16"
    saved = f"{1 - after / before:.0%}"
    speed = f"{read / after / 1e6:.2f}"
    return [case.title, name, f"{before:.1f}", f"{after:.1f}", saved, speed, f"{off:.3f}"]


def sweep() -> None:
    """Print what the first case takes with other tiles of our kernel."""
    import decode_kernel
    from triton.runtime.errors import OutOfResources

    sizes = itertools.product((32, 64, 128), (3, 5, 7), (1, 2, 4), (None, 160, 128, 96))
    for dtype, (keys, stages, warps, registers) in itertools.product(
        (torch.float8_e4m3fn, torch.bfloat16), sizes
    ):
        tile = {"BN": keys, "STAGES": stages, "num_warps": warps, "maxnreg": registers}
        decode_kernel.TILE = decode_kernel.FP8_TILE = tile
        try:
            _, cache, _, ours, _, speed, off = measure(CASES[0], dtype)
        except OutOfResources:
            continue
        limit = f", at most {registers} registers" if registers else ""
        text = f"{keys} keys, {stages} stages, {warps} warps{limit}"
        print(f"{cache}, {text}: {ours} us, {speed} TB/s, off by {off}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--write", action="store_true", help="write bench/results/")
    parser.add_argument("--sweep", action="store_true", help="time other tiles instead")
    arguments = parser.parse_args()
    if arguments.sweep:
        return sweep()
    table = Table(
        ["requests", "cache", "FlashAttention 3 us", "ours us", "saved", "ours TB/s", "difference"]
    )
    for case in CASES:
        for dtype in (torch.bfloat16, torch.float8_e4m3fn):
            row = measure(case, dtype)
            print(*row, sep=", ", flush=True)
            table.add(row)
    print(table)
    if arguments.write:
        name = torch.cuda.get_device_name()
        about = f"The attention of one layer while requests decode, on an {name}"
        load = os.getloadavg()[0]
        write_report("decode_attention", about, table, load, packages=("torch", "triton", "vllm"))


if __name__ == "__main__":
    main()
