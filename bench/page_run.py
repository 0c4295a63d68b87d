"""Writes a run that was never trained, for tests and benchmarks of the page.

    python -m bench.page_run DIRECTORY --steps 1000 --attempts 100 --text 2000

The files are written by the code that writes those of a real run. Every number is drawn from a
seed, so two calls write the same run.
"""

import argparse
import json
import math
import random
import time
from array import array
from pathlib import Path

from kit.state_dir import CHECKPOINTS, EVALS, HISTORY, model_path, step_name
from kit.types import Json
from trainer.page import batches
from trainer.page.batches import Attempt, Group, TokenSequence

WORDS = [f"{a}{b}{c}" for a in "bdgklmnprst" for b in "aeiou" for c in ("", "n", "r", "s")]
PARTS = ("correct", "format", "brevity")


def write_run(
    directory: Path,
    *,
    project: str = "demo",
    name: str = "synthetic",
    steps: int = 20,
    attempts: int = 32,
    generations: int = 8,
    text: int = 600,
    tokens: int = 120,
    examples: int = 50,
    validate_every: int = 5,
    kept: int | None = None,
    checkpoints: int = 3,
    seed: int = 0,
) -> Path:
    """Write a run with `attempts` per step below `directory` and return the run's directory.

    `text` is the length of the longest message, `kept` the number of steps whose attempts are on
    disk (all by default).
    """
    run = model_path(directory, project, name)
    run.mkdir(parents=True, exist_ok=True)
    maker = _Maker(random.Random(seed), generations=generations, text=text, tokens=tokens)
    begun = time.time() - steps * 30
    first_kept = 0 if kept is None else steps - kept
    with (run / HISTORY).open("w", encoding="utf-8") as history:
        for step in range(steps + 1):
            when = begun + step * 30
            share = step / max(steps, 1)
            if step:
                count = max(attempts // generations, 1)
                groups = [
                    maker.group(f"example-{(step * count + at) % examples:03d}", share, step)
                    for at in range(count)
                ]
                line = _metrics(maker.random, groups, share)
                history.write(json.dumps({"step": step, **line, "recorded_at": when}) + "\n")
                canary = {"canary/logprob_difference": 0.001, "canary/bound": 0.05}
                history.write(json.dumps({"step": step, **canary, "recorded_at": when}) + "\n")
                if step > first_kept:
                    _write(run, step, groups, maker.pieces, batches.TRAIN)
            if validate_every and step % validate_every == 0:
                logged = [maker.group(f"val-{at:03d}", share, step, size=1) for at in range(20)]
                mean = sum(group.mean or 0.0 for group in logged) / len(logged)
                line = {"step": step, "val/reward": mean, "recorded_at": when}
                history.write(json.dumps(line) + "\n")
                if step >= first_kept:
                    _write(run, step, logged, maker.pieces, "val")
    for step in range(max(steps - checkpoints + 1, 0), steps + 1):
        _write_checkpoint(run, step)
    return run


def write_eval(
    run: Path, name: str = "val", *, examples: int = 20, generations: int = 4, seed: int = 0
) -> Path:
    """Write an evaluation of a base model and a trained one to the run's directory."""
    draw = random.Random(seed)
    path = run / EVALS / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines: list[Json] = [{"kind": "settings", "settings": {}}]
    models = {"tiny-random@base": 0.3, "agent@2": 0.8}
    for model, skill in models.items():
        for at in range(examples * generations):
            reward = float(draw.random() < skill)
            lost = model != "tiny-random@base" and at == 0
            row = {
                **{
                    "kind": "run",
                    "model": model,
                    "digest": "0",
                    "id": f"val-{at // generations:03d}",
                },
                **{"generation": at % generations, "output": " ".join(draw.choices(WORDS, k=30))},
                **{
                    "reward": None if lost else reward,
                    "metrics": {} if lost else {"exact": reward},
                },
                "failure": "workflow_timed_out" if lost else None,
                "error": "the workflow took longer than 60 s" if lost else "",
                **{"seconds": round(draw.uniform(0.5, 3), 3), "calls": 1},
            }
            lines.append({**row, "reasons": {} if lost else {"judge": "It is terse."}})
    passes = [{"k": k} for k in sorted({1, generations})]
    summary = {"models": [{"model": model, "pass_at": passes} for model in models]}
    about = {"success": "reward is 1", "success_reward": None}
    lines.append({"kind": "summary", "name": name, **about, **summary})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


class _Maker:
    """Draws groups and attempts."""

    def __init__(self, source: random.Random, *, generations: int, text: int, tokens: int) -> None:
        self.random = source
        self.generations = generations
        self.tokens = tokens
        self.pieces = {at: f" {word}" for at, word in enumerate(WORDS)}
        self._long = " ".join(source.choices(WORDS, k=text // 3 + 1))[: max(text, 1)]

    def group(self, example: str, share: float, step: int, size: int | None = None) -> Group:
        skill = random.Random(example).random()
        attempts = [
            self.attempt(number, example, 0.2 + 0.6 * share * skill, step)
            for number in range(size or self.generations)
        ]
        group = Group(attempts, example)
        group.trainable = bool(group.spread)
        if not group.trainable:
            group.dropped = "equal_rewards"
        for attempt in attempts:
            attempt.advantage = (attempt.reward or 0.0) - (group.mean or 0.0)
            for sequence in attempt.sequences:
                sequence.advantage, sequence.weight = attempt.advantage, 1.0
        return group

    def attempt(self, number: int, example: str, skill: float, step: int) -> Attempt:
        draw = self.random
        parts = {name: float(draw.random() < skill) for name in PARTS}
        start = draw.randrange(max(len(self._long) // 2, 1))
        answer = self._long[start : start + draw.randint(20, max(len(self._long), 21))]
        call = {"name": "look_up", "arguments": json.dumps({"word": example})}
        messages = [
            {"role": "system", "content": "Answer in one line."},
            {"role": "user", "content": f"What does {example} mean?"},
            {
                **{"role": "assistant", "content": "", "trained": True},
                "tool_calls": [{"id": "call_0", "type": "function", "function": call}],
            },
            {"role": "tool", "content": self._long[:200], "tool_call_id": "call_0"},
            {"role": "assistant", "content": answer, "trained": True},
        ]
        return Attempt(
            number=number,
            example=example,
            reward=sum(parts.values()) / len(parts),
            conversations=[{"messages": messages}],
            parts=parts,
            metadata={"example_id": example, "generation": number, "reason/judge": "It is terse."},
            turns=2,
            tokens=self.tokens // 2,
            finish="stop",
            preview=answer,
            sequences=[self._sequence(step)] if self.tokens else [],
        )

    def _sequence(self, step: int) -> TokenSequence:
        draw, count = self.random, self.tokens
        half = count // 2
        logprobs = [-draw.expovariate(2) for _ in range(count - half)]
        unknown = [math.nan] * half
        return TokenSequence(
            ids=array("i", draw.choices(range(len(WORDS)), k=count)),
            mask=bytes(half) + b"\1" * (count - half),
            logprobs=array("f", unknown + logprobs),
            learner=array("f", unknown + [it + draw.gauss(0, 0.01) for it in logprobs]),
            policy_steps=[(half, count, step - 1)],
        )


def _metrics(draw: random.Random, groups: list[Group], share: float) -> dict[str, float]:
    attempts = [attempt for group in groups for attempt in group.attempts]
    trainable = sum(group.trainable for group in groups)
    tokens = sum(attempt.tokens for attempt in attempts)
    numbers = {
        "train/reward": sum(attempt.reward or 0.0 for attempt in attempts) / len(attempts),
        "train/reward_std_dev": sum(group.spread or 0.0 for group in groups) / len(groups),
        "num_gradient_steps": 1.0,
        "data/step_num_groups_submitted": float(len(groups)),
        "data/step_num_groups_trainable": float(trainable),
        "data/step_num_trajectories": float(len(attempts)),
        "data/step_trainer_tokens": float(tokens),
        "data/step_num_truncated": float(draw.randrange(3)),
        "data/dropped_equal_rewards": float(len(groups) - trainable),
        "time/step_s": draw.uniform(8, 12),
        "time/gradient_s": draw.uniform(5, 7),
        "time/save_s": draw.uniform(0.2, 0.4),
        "time/load_s": draw.uniform(0.5, 1),
    }
    for part in PARTS:
        values = [attempt.parts[part] for attempt in attempts]
        numbers[f"train/{part}"] = sum(values) / len(values)
    for name, middle in (
        *(("entropy", 1.2 - share), ("kl_div", 0.01), ("clip_frac", 0.05), ("grad_norm", 0.3)),
        *(("sampler_kl", 0.002), ("sampler_gap", 0.01), ("ratio", 1.0), ("train", -0.1)),
        *(("learning_rate", 5e-5),),
    ):
        numbers[f"loss/{name}"] = middle * draw.uniform(0.8, 1.2)
    return numbers


def _write(run: Path, step: int, groups: list[Group], pieces: dict[int, str], split: str) -> None:
    path = batches.path_of(run, step, split)
    path.unlink(missing_ok=True)  # a second call writes the run anew
    about = {"step": step, "config": {"learning_rate": 5e-5}}
    batches.write(path, about, groups, pieces, split=split)


def _write_checkpoint(run: Path, step: int) -> None:
    path = run / CHECKPOINTS / step_name(step)
    path.mkdir(parents=True, exist_ok=True)
    adapter = {"sha256": f"{step:064x}", "bytes": 1_000_000}
    manifest = {
        **{"step": step, "parent": step - 1 if step else None, "base_model": "tiny-random"},
        **{"lora": {"rank": 8}, "config": {"learning_rate": 5e-5}},
        "files": {"adapter_model.safetensors": adapter},
    }
    (path / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--attempts", type=int, default=32, help="attempts of each step")
    parser.add_argument("--text", type=int, default=600, help="characters of the longest message")
    parser.add_argument("--tokens", type=int, default=120, help="tokens of each attempt")
    parser.add_argument("--name", default="synthetic")
    given = parser.parse_args()
    begun = time.monotonic()
    options = vars(given)
    print(write_run(options.pop("directory"), **options))
    print(f"{time.monotonic() - begun:.1f} s")


if __name__ == "__main__":
    main()
