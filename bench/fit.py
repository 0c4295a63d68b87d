"""Compares the memory that `launcher up --for` plans with (`kit/fit.py`) with what a GPU uses.

    python bench/fit.py        every model that fits on an H200, with random weights

The learner trains rows of 4,096 tokens and recomputes all it can. vLLM gets exactly the planned
memory, and must start with a cache for 16 conversations of 4,096 tokens.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.report import Table, write_report
from bench.shapes import QWEN3_4B, QWEN25_7B, Config, random_policy, random_row, weighted_loss
from kit.fit import AT_ONCE, ENGINE_OUTSIDE_GIB, GIB, TOKENS, Fit, fit, fits
from kit.gpus import CARDS, Card
from kit.model_shape import parse_shape
from trainer.base_model.resolve import resolve
from trainer.engines import vllm_args
from trainer.learner.gradient import row_logprobs

STARTS_WITHIN_S = 400


def _shape(
    kind: str, vocabulary: int, dim: int, ffn: int, layers: int, heads: int, kv_heads: int,
    head_dim: int, tied: bool, context: int,
) -> Config:  # fmt: skip
    architectures = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    return {
        **QWEN25_7B,
        "model_type": kind,
        "architectures": [f"{architectures[kind]}ForCausalLM"],
        "vocab_size": vocabulary,
        "hidden_size": dim,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "tie_word_embeddings": tied,
        "max_position_embeddings": context,
    }


MODELS = {
    "Qwen2.5-0.5B": _shape("qwen2", 151_936, 896, 4864, 24, 14, 2, 64, True, 32_768),
    "Llama-3.2-1B": _shape("llama", 128_256, 2048, 8192, 16, 32, 8, 64, True, 131_072),
    "Qwen3-1.7B": _shape("qwen3", 151_936, 2048, 6144, 28, 16, 8, 128, True, 40_960),
    "Llama-3.2-3B": _shape("llama", 128_256, 3072, 8192, 28, 24, 8, 128, True, 131_072),
    "Qwen3-4B": QWEN3_4B,
    "Qwen2.5-7B": QWEN25_7B,
    "Llama-3.1-8B": _shape("llama", 128_256, 4096, 14_336, 32, 32, 8, 128, False, 131_072),
    "Qwen3-14B": _shape("qwen3", 151_936, 5120, 17_408, 40, 40, 8, 128, False, 40_960),
    "Qwen2.5-32B": _shape("qwen2", 152_064, 5120, 27_648, 64, 40, 8, 128, False, 32_768),
    "Llama-3.3-70B": _shape("llama", 128_256, 8192, 28_672, 80, 64, 8, 128, False, 131_072),
}


def used_gib(pid: int | None = None) -> float:
    """GPU memory of one process, or of the whole card, by the driver."""
    what = "--query-compute-apps=pid,used_memory" if pid else "--query-gpu=memory.used"
    command = ["nvidia-smi", what, "--format=csv,noheader,nounits"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    rows = [line.split(",") for line in lines]
    return next((float(row[-1]) / 1024 for row in rows if not pid or int(row[0]) == pid), 0.0)


def train(name: str) -> float:
    """GiB of a process that trains rows of the planned length; run in a process of its own."""
    device = torch.device("cuda")
    policy = random_policy(MODELS[name], 8, device, limit=0)  # no memory to spare: recompute
    torch.cuda.reset_peak_memory_stats()  # what loading took can be taken again
    row = random_row(1, 1, 1, TOKENS - 1, device)
    optimizer = torch.optim.AdamW(policy.trainable().values(), lr=1e-4)
    for _ in range(3):
        optimizer.zero_grad()
        torch.autograd.backward(weighted_loss(row_logprobs(policy, row)[0]))
        optimizer.step()
    torch.cuda.synchronize()
    context = max(used_gib(os.getpid()) - torch.cuda.memory_reserved() / GIB, 0.5)
    return torch.cuda.max_memory_reserved() / GIB + context


def sample(name: str, one: Fit) -> tuple[int, float]:
    """Tokens in the cache of a vLLM that gets the planned memory, and GiB that it uses."""
    config = MODELS[name]
    share = (one.engine - ENGINE_OUTSIDE_GIB) / one.card.memory_gib
    with TemporaryDirectory() as scratch:
        directory = Path(scratch) / "model"
        directory.mkdir()
        for path in resolve("tiny-random").glob("tokenizer*"):
            (directory / path.name).write_bytes(path.read_bytes())
        (directory / "config.json").write_text(json.dumps({**config, "hidden_act": "silu"}))
        arguments = vllm_args.defaults(directory, rank=8, cuda=True) | {
            "load_format": "dummy",
            "gpu_memory_utilization": round(share, 4),
            "max_model_len": min(AT_ONCE * TOKENS, config["max_position_embeddings"]),
        }
        command = vllm_args.command_line(directory, Path(scratch) / "socket", arguments)
        log = Path(scratch) / "log"
        with log.open("w") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *command],
                env={**os.environ, **vllm_args.environment(cuda=True)},
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        try:
            return wait(process, log)
        finally:
            process.terminate()
            process.wait(60)


def wait(process: "subprocess.Popen[bytes]", log: Path) -> tuple[int, float]:
    deadline = time.monotonic() + STARTS_WITHIN_S
    while time.monotonic() < deadline and process.poll() is None:
        if "Application startup complete" in (text := log.read_text()):
            found = re.search(r"GPU KV cache size: ([\d,]+) tokens", text)
            assert found, "vLLM did not say how large its cache is"
            return int(found[1].replace(",", "")), used_gib()
        time.sleep(0.5)
    errors = [line for line in log.read_text().splitlines() if "Error" in line]
    raise SystemExit("\n".join(["vLLM did not start:", *errors]))


def train_apart(name: str) -> float | None:
    done = subprocess.run(
        [sys.executable, __file__, "--train", name], capture_output=True, text=True
    )
    print(name, "trained", done.stdout.strip() or done.stderr[-1500:], flush=True)
    return float(done.stdout.split()[-1]) if done.returncode == 0 else None


def run_all(learners: list[str], engines: list[str], at_once: int, card: Card) -> None:
    planned = {name: fit(parse_shape(config, name), card) for name, config in MODELS.items()}
    with ThreadPoolExecutor(at_once) as pool:
        trained = dict(zip(learners, pool.map(train_apart, learners), strict=True))
    sampled = {}
    for name in engines:
        sampled[name] = sample(name, planned[name])
        print(name, "sampled", sampled[name], flush=True)
    heads = ["model", "smallest machine that holds both", "GiB to sample, planned"]
    heads += ["share given to vLLM, GiB", "used", "cached tokens", "GiB to train, planned", "used"]
    table = Table(heads)
    for name, config in MODELS.items():
        enough = fits(parse_shape(config, name), list(CARDS.values()))
        cards = f"{enough[0].card.name}:{enough[0].count}" if enough else "none"
        tokens, used = sampled.get(name, (None, None))
        table.add([
            name,
            cards,
            f"{planned[name].engine:.1f}",
            f"{planned[name].engine - ENGINE_OUTSIDE_GIB:.1f}",
            f"{used:.1f}" if used else "-",
            f"{tokens:,}" if tokens else "-",
            f"{planned[name].learner:.1f}",
            f"{trained[name]:.1f}" if trained.get(name) else "-",
        ])  # fmt: skip
    print(table)
    about = (
        f"On one {torch.cuda.get_device_name()}: the memory that `launcher up --for` plans with, "
        "and what was used, in bf16 with a LoRA of rank 8. The learner trained rows of "
        f"{TOKENS:,} tokens and recomputed all it can. vLLM was given exactly the planned memory; "
        f"its cache must hold {AT_ONCE * TOKENS:,} tokens"
    )
    load = os.getloadavg()[0]
    write_report("fit", about, table, load, packages=("torch", "vllm"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", help="measure the learner of one model in this process")
    parser.add_argument("--learners", nargs="*", default=list(MODELS)[:-1])
    parser.add_argument("--engines", nargs="*", default=list(MODELS)[:-1])
    parser.add_argument("--at-once", type=int, default=1, help="learners measured at once")
    parser.add_argument("--card", default="H200")
    chosen = parser.parse_args()
    if chosen.train:
        print(train(chosen.train))
    else:
        run_all(chosen.learners, chosen.engines, chosen.at_once, CARDS[chosen.card])
