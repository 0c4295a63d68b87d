"""Compares vLLM's LoRA kernels, as they are and tuned by `in_vllm/tuned`, with ours, on this GPU.

    python bench/lora_kernels.py [--write]      # where vLLM and the GPU are

The table shows the microseconds of all LoRA kernels of one layer while `requests` requests decode,
and how far the results differ from vLLM's own, relative to the largest. vLLM finds the settings by
the GPU's name. It uses its kernels for long prompts, and ours (`in_vllm/lora_kernel.py`) for the
rest.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "trainer/engines/in_vllm")]

from bench.report import Table, write_report  # noqa: E402
from bench.shapes import QWEN3_4B, QWEN25_7B, Config  # noqa: E402

TUNED = ROOT / "trainer/engines/in_vllm/tuned"
LORAS = 2  # as `vllm_args.defaults` has it
CASES = (  # the last number: how many LoRAs the requests use, by turns
    *(("7B, rank 8", QWEN25_7B, 8, 128, 1), ("7B, rank 8", QWEN25_7B, 8, 256, 1)),
    *(("4B, rank 16", QWEN3_4B, 16, 512, 1), ("4B, rank 16", QWEN3_4B, 16, 1024, 1)),
    *(("4B, rank 16", QWEN3_4B, 16, 512, 2), ("4B, rank 16", QWEN3_4B, 16, 1024, 2)),
    ("7B, rank 64", QWEN25_7B, 64, 256, 1),
)


def products(config: Config) -> list[tuple[int, list[int]]]:
    """Return the input and the outputs of each layer's products: merged ones have several."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = (config[f"num_{name}_heads"] * head for name in ("attention", "key_value"))
    return [
        *((hidden, [queries, keys, keys]), (queries, [hidden])),
        *((hidden, [inner, inner]), (inner, [hidden])),
    ]


def layer(
    config: Config, rank: int, requests: int, used: int
) -> tuple[Callable[[], None], Callable[[], None], list[Any]]:
    """Return what runs a layer's LoRA kernels, vLLM's and ours, and where the results are."""
    from lora_kernel import add_lora
    from vllm.lora.ops.triton_ops import lora_expand, lora_shrink
    from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta

    torch.manual_seed(1)
    meta = LoRAKernelMeta.make(LORAS, requests, "cuda")
    meta.prepare_tensors(torch.arange(requests, dtype=torch.int32, device="cuda") % used)
    arguments = meta.meta_args(requests, False)
    calls, results = [], []
    for width, outputs in products(config):
        given = {"device": "cuda", "dtype": torch.bfloat16}
        x = torch.randn(requests, width, **given)
        down = [torch.randn(LORAS, 1, rank, width, **given) / width**0.5 for _ in outputs]
        up = [torch.randn(LORAS, 1, out, rank, **given) for out in outputs]
        low = torch.zeros(len(outputs), requests, rank, device="cuda")
        result = torch.zeros(requests, sum(outputs), **given)
        results.append(result)
        calls.append((x, down, low, up, result))

    def run() -> None:
        for x, down, low, up, result in calls:
            lora_shrink(x, down, low, *arguments, 1.0)
            lora_expand(low, up, result, *arguments, offset_start=0, add_inputs=True)

    def run_ours() -> None:
        for x, down, _, up, result in calls:
            add_lora(result, x, down, up, *arguments[:3], 1.0)

    return run, run_ours, results


def microseconds(run: Callable[[], None]) -> float:
    """Return the median time of a CUDA graph of `run`."""
    for _ in range(3):  # compiles
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            run()
    times = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 100)  # ms of ten
    return statistics.median(times)


def use(tuned: bool) -> None:
    """Make vLLM use its own settings or ours."""
    from vllm.lora.ops.triton_ops import utils

    name = torch.cuda.get_device_name().replace(" ", "_").replace("-", "_")

    def load(kind: str, add_inputs: bool | None) -> Any:
        suffix = "" if add_inputs is None else f"_{str(add_inputs).upper()}"
        path = TUNED / f"{name}_{kind.upper()}{suffix}.json"
        return json.loads(path.read_text()) if tuned else None

    utils.load_lora_op_config = load
    utils.get_lora_op_configs.cache_clear()


def once(run: Callable[[], None], results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    for result in results:
        result.zero_()
    run()
    return [result.float() for result in results]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--write", action="store_true", help="write bench/results/lora_kernels.md")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    table = Table(
        [
            "shape",
            "requests",
            "LoRAs",
            "vLLM's own us",
            "tuned us",
            "ours us",
            "saved",
            "difference",
        ]
    )
    for title, config, rank, requests, used in CASES:
        run, run_ours, results = layer(config, rank, requests, used)
        times, found = [], []
        for tuned, kernels in ((False, run), (True, run), (True, run_ours)):
            use(tuned)
            found.append(once(kernels, results))
            times.append(microseconds(kernels))
        difference = max(
            float((other - own).abs().max() / own.abs().max())
            for others in found[1:]
            for own, other in zip(found[0], others, strict=True)
        )
        saved = f"{1 - times[2] / times[0]:.0%}"
        shown = [f"{time:.1f}" for time in times]
        table.add([title, str(requests), str(used), *shown, saved, f"{difference:.4f}"])
    what = f"All LoRA kernels of one layer on an {torch.cuda.get_device_name()}"
    print(f"{what}\n\n{table}")
    if arguments.write:
        write_report("lora_kernels", what, table, load, packages=("torch", "vllm"))


if __name__ == "__main__":
    main()
