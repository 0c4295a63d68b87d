"""Compares the learner with transformers + peft: same model, tokens, LoRA and loss, on this CPU.

    python bench/learner.py --cpu [--model NAME] [--repeats N]
    python bench/learner.py --cuda [--peft-path DIR]        the table of `bench/learner_cuda.py`

Each stack runs in its own process and environment, because peft rejects the torchao that TorchTune
needs; `scripts/parity` creates the other environment. A measurement is the forward and backward
pass of one batch, in CPU seconds of one thread. The stacks take turns, and the best of N turns
counts, which reduces the effect of other load. Both stacks compute in bfloat16, apply the head only
to the tokens whose logprob is needed, and train a LoRA of rank 8 on all linear layers.

Scenarios:
  dense    8 sequences of 256 tokens, 60 of them chosen: nothing to share
  groups   16 completions of 60 tokens for one 500-token prompt: one group
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RANK, ALPHA = 8, 16
SCENARIOS = ("dense", "groups")
TARGETS = {"dense": 1.1, "groups": 2.5}  # minimum speed relative to transformers + peft
MICRO_BATCH = {"dense": 8, "groups": 4}  # sequences per batch of transformers, its fastest here


def sequences(scenario: str) -> tuple[list[list[int]], int]:
    """Token ids of each sequence, and the position where the chosen tokens start."""
    draw = random.Random(0)

    def text(length: int) -> list[int]:
        return [draw.randrange(20, 49_000) for _ in range(length)]

    if scenario == "dense":
        return [text(256) for _ in range(8)], 196
    prompt = text(500)
    return [prompt + text(60) for _ in range(16)], 500


def ours(model: str, scenario: str) -> Callable[[], None]:
    import torch

    from trainer.base_model.resolve import resolve
    from trainer.config import LoraConfig
    from trainer.learner.gradient import row_logprobs
    from trainer.learner.pack import pack
    from trainer.learner.prefix_tree import Sample
    from trainer.policy.device import keep_freed_memory
    from trainer.policy.model import load_model

    keep_freed_memory()  # as the learner's process does
    policy = load_model(
        resolve(model),
        lora=LoraConfig(rank=RANK, alpha=ALPHA),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    given, start = sequences(scenario)
    samples = [
        Sample(
            ids=ids,
            mask=[at >= start for at in range(len(ids))],
            logprobs=[-1.0] * len(ids),
            advantage=1.0,
            weight=1.0,
            group=0,
            trajectory=number,
        )
        for number, ids in enumerate(given)
    ]

    def step() -> None:
        policy.zero_grad()
        for row in pack(samples, length=2048):  # packing is part of the work
            logprobs, _ = row_logprobs(policy, row)
            logprobs.sum().backward()

    return step


def theirs(model: str, scenario: str) -> Callable[[], None]:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    lora = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=names)
    # A bfloat16 LoRA is faster than peft's default, fp32.
    policy = get_peft_model(base, lora, autocast_adapter_dtype=False)
    given, start = sequences(scenario)
    tokens = torch.tensor(given)

    def step() -> None:
        policy.zero_grad()
        for batch in tokens.split(MICRO_BATCH[scenario]):
            predictors = torch.arange(start - 1, batch.shape[1] - 1)
            logits = policy(batch, logits_to_keep=predictors, use_cache=False).logits.float()
            logits.log_softmax(-1).gather(-1, batch[:, start:, None]).sum().backward()

    return step


def measure(step: Callable[[], None]) -> None:
    """Run one step per line on stdin and print its figures, so that the stacks can take turns."""
    import torch

    torch.set_num_threads(1)
    step()  # first use of memory and kernels
    for _ in sys.stdin:
        started = time.process_time()
        step()
        seconds = time.process_time() - started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"cpu_s": seconds, "peak_gib": peak / 2**30}), flush=True)


class Stack:
    """A process that measures one stack, a step at a time."""

    def __init__(self, python: str, name: str, model: str, scenario: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environment["PYTHONPATH"] = str(ROOT)
        command = [python, __file__, "--stack", name, "--model", model, "--scenario", scenario]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def step(self) -> dict[str, float]:
        assert self._process.stdin and self._process.stdout
        print("go", file=self._process.stdin, flush=True)
        figures: dict[str, float] = json.loads(self._process.stdout.readline())
        return figures

    def stop(self) -> None:
        self._process.communicate()


def run(pythons: dict[str, str], model: str, scenario: str, repeats: int) -> dict[str, Any]:
    """The best step of each stack and its peak memory. Stacks take turns, to share other load."""
    stacks = {name: Stack(python, name, model, scenario) for name, python in pythons.items()}
    rounds = [{name: stack.step() for name, stack in stacks.items()} for _ in range(repeats)]
    for stack in stacks.values():
        stack.stop()
    return {
        name: {
            "cpu_s": min(turn[name]["cpu_s"] for turn in rounds),
            "peak_gib": rounds[-1][name]["peak_gib"],
        }
        for name in pythons
    }


def compare(model: str, repeats: int) -> bool:
    from trainer.base_model.resolve import resolve

    directory = str(resolve(model))
    parity = subprocess.run(
        [ROOT / "scripts" / "parity"], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()
    print(f"{model}, bfloat16, one thread, best of {repeats}; torch on {os.uname().machine}\n")
    print("scenario  stack                 CPU s  tok/s  trajectories/s  peak GiB  speed  target")
    met = True
    for scenario in SCENARIOS:
        given, _ = sequences(scenario)
        tokens = sum(map(len, given))
        pythons = {"theirs": parity, "ours": sys.executable}
        found = run(pythons, directory, scenario, repeats)
        speed = found["theirs"]["cpu_s"] / found["ours"]["cpu_s"]
        lean = found["ours"]["peak_gib"] <= found["theirs"]["peak_gib"]
        met = met and speed >= TARGETS[scenario] and lean
        for stack, name in (("theirs", "transformers + peft"), ("ours", "art-cluster")):
            seconds, peak = found[stack]["cpu_s"], found[stack]["peak_gib"]
            mark = f"{speed:5.2f}x  {TARGETS[scenario]}x" if stack == "ours" else " 1.00x"
            print(
                f"{scenario:8}  {name:19}  {seconds:6.2f}  {tokens / seconds:5.0f}"
                f"  {len(given) / seconds:14.2f}  {peak:8.2f}  {mark}"
            )
    print(f"\nTargets (speed, and peak memory no higher): {'met' if met else 'NOT met'}")
    return met


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="compare both stacks on this CPU")
    parser.add_argument("--cuda", action="store_true", help="compare both stacks on this GPU")
    parser.add_argument("--peft-path", default="", help="PYTHONPATH of a peft without torchao")
    parser.add_argument("--cases", help="with --cuda: only these cases, separated by commas")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--stack", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    parser.add_argument("--scenario", choices=SCENARIOS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stack:
        build = {"ours": ours, "theirs": theirs}[arguments.stack]
        step = build(arguments.model, arguments.scenario)
        measure(step)
    elif arguments.cpu:
        sys.exit(0 if compare(arguments.model, arguments.repeats) else 1)
    elif arguments.cuda:
        sys.path.insert(0, str(ROOT))
        from bench.learner_cuda import CASES, run_all

        run_all(arguments.peft_path, (arguments.cases or ",".join(CASES)).split(","))
    else:
        parser.error("choose `--cpu` or `--cuda`")


if __name__ == "__main__":
    main()
