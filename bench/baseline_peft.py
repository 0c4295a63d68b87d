"""The baseline: transformers + peft on the same shape, in a process without our own packages.

`python bench/baseline_peft.py CASE [--checkpointing]` prints one JSON object. peft rejects the
torchao that TorchTune needs, so PYTHONPATH must contain a peft without torchao.
"""

import argparse
import gc
import itertools
import json
import statistics
import sys
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model


def model_of(config: dict[str, Any], rank: int) -> Any:
    """A model of the given shape with random weights and a LoRA on every linear layer."""
    fields = {key: value for key, value in config.items() if key not in ("model_type",)}
    made = transformers.AutoConfig.for_model(config["model_type"], **fields)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="sdpa")
        torch.set_default_dtype(torch.float32)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return get_peft_model(
        model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names, lora_dropout=0.0)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", help="JSON: config, rank, sequences, prompt, completion, micro")
    parser.add_argument("--checkpointing", action="store_true")
    arguments = parser.parse_args()
    case = json.loads(arguments.case)
    model = model_of(case["config"], case["rank"])
    model.train()
    if arguments.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    length = case["prompt"] + case["completion"]
    micro = case["micro"] or case["sequences"]
    ids = torch.randint(1000, 100_000, (case["sequences"], length), device="cuda")
    keep = case["completion"]

    def step() -> None:
        model.zero_grad(set_to_none=True)
        for part in ids.split(micro):
            # Only the logits that predict the completions.
            logits = model(input_ids=part, use_cache=False, logits_to_keep=keep + 1).logits
            loss = 0.0
            for row, target in zip(logits[:, :-1], part[:, -keep:], strict=True):
                picked = row.gather(-1, target[:, None])[:, 0].float()
                loss = loss + (picked - row.float().logsumexp(dim=-1)).mean()
            loss.backward()

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(5)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    seconds = [start.elapsed_time(end) / 1000 for start, end in itertools.pairwise(marks)]
    median = statistics.median(seconds)
    json.dump(
        {
            "seconds": median,
            "tokens_per_second": case["sequences"] * length / median,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
            "transformers": transformers.__version__,
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
