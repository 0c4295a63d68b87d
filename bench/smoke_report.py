"""Prints the table of a `scripts/gpu-smoke` run: the time of each step's parts, and the gap.

The gap is the difference between the engine's and the learner's logprobs.
"""

import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.report import Table

CANARY = "canary/logprob_difference"
TIMES = ("prepare", "gradient", "save", "load")


def rows_of(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    out = Path(sys.argv[1])
    # The run's history also has rows from validation and from the harness.
    history = rows_of(out / "history.jsonl")
    steps = [row for row in history if "time/step_s" in row]
    # Sampling is timed by its caller: the harness or the benchmark's loop.
    outside = rows_of(out / "training_metrics.jsonl") or rows_of(out / "steps.jsonl")
    times = [f"{name} s" for name in ("sample", "request", *TIMES, "other")]
    heads = ["step", "reward", *times, "overhead", "gap"]
    table = Table(heads)
    for row, their in zip(steps, outside, strict=False):
        sample = their.get("time/sample_s", their.get("sample_s", float("nan")))
        call = their.get("time/train_s", their.get("train_call_s", float("nan")))
        parts = [row.get(f"time/{name}_s", 0.0) for name in TIMES]
        request = call - row["time/step_s"]  # to receive, parse, match and journal the request
        cells = [sample, request, *parts, row["time/step_s"] - sum(parts)]
        overhead = call - row.get("time/gradient_s", 0.0)  # all but sampling and gradients
        table.add(
            [
                f"{row['step']:.0f}",
                f"{row.get('train/reward', float('nan')):.3f}",
                *(f"{value:.2f}" for value in cells),
                f"{overhead:.2f} s, {overhead / (sample + call):.1%}",
                f"{row.get('loss/sampler_gap', float('nan')):.4f}",
            ]
        )
    print(table)
    gaps = [row["loss/sampler_gap"] for row in steps if "loss/sampler_gap" in row]
    checks = [row[CANARY] for row in history if CANARY in row]
    if gaps:
        print("\nMean absolute difference between the engine's and the learner's logprobs:")
        trained, canary = statistics.mean(gaps), statistics.mean(checks)
        print(f"{trained:.4f} on trained tokens, {canary:.4f} on the canary's prompt.")


if __name__ == "__main__":
    main()
