"""Measures what sampling ahead is worth: agents that wait for tools, with 0 and 1 steps off-policy.

    python bench/overlap.py [--engine embedded replay] [--steps 12] [--groups 4] [--latency 1]
    python bench/overlap.py --engine replay --learner-s 6 --write

The harness trains an agent that calls the model in turns and waits for a tool after each: the
waits are lognormal with a median of 2 s, cut at 30 s, times `--latency`. `embedded` is the real
engine. `replay` answers with what that engine sampled at first, and sleeps for as long as `--rate`
tokens per second would take, so that sampling needs no core; `--learner-s` makes each step take at
least that long. The engine is busy while it samples at least one request, the learner while it
trains a step. Times are from the first request to the end of the last step.
"""

import argparse
import asyncio
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.gateway import wait_until_served  # noqa: E402
from bench.measured_server import serve  # noqa: E402
from bench.report import Table, machine, write_report  # noqa: E402
from trainer.harness.finetune import train  # noqa: E402

MEDIAN_S, LONGEST_S, SPREAD = 2.0, 30.0, 1.0
EXAMPLES = 64
Interval = tuple[float, float]


class Tools:
    """An agent whose tools take as long as real ones, in the same order in every mode."""

    def __init__(self, turns: int, tokens: int, latency: float) -> None:
        self._turns = turns
        self._tokens = tokens
        self._latency = latency
        self._runs: dict[str, int] = {}

    async def __call__(self, example: Any, llm: Any) -> str:
        number = self._runs[example.id] = self._runs.get(example.id, 0) + 1
        waits = random.Random(f"{example.id}/{number}")
        messages = [{"role": "user", "content": example.question}]
        message: Any = {}
        for _ in range(self._turns):
            message = await llm.chat(messages, max_tokens=self._tokens)
            wait = min(LONGEST_S, waits.lognormvariate(math.log(MEDIAN_S), SPREAD))
            await asyncio.sleep(wait * self._latency)
            text = {"role": "assistant", "content": message["content"]}
            messages += [text, {"role": "user", "content": f"The tool took {wait:.1f} s. Go on."}]
        return str(message["content"])


def questions() -> Iterator[dict[str, str]]:
    for number in range(EXAMPLES):
        yield {"id": f"example{number}", "question": f"Task {number}: use the tool.", "answer": ""}


def reward(run: Any) -> float:
    """A reward that always differs, so that every group is trained in both modes."""
    return random.random()


@contextmanager
def serving(arguments: argparse.Namespace, engine: str, directory: Path) -> Iterator[None]:
    """Serve in a process of its own, which writes `busy.jsonl`."""
    names = ("base_model", "port", "openai_port", "tokens", "rate", "learner_s")
    given = [f"--{name.replace('_', '-')}={getattr(arguments, name)}" for name in names]
    files = [f"--busy={directory / 'busy.jsonl'}", f"--state-dir={directory / '.art'}"]
    replay = ["--replay"] if engine == "replay" else []
    log = directory / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, __file__, "--serve", *given, *files, *replay],
            stdout=output,
            stderr=output,
        )
    try:
        wait_until_served(arguments.openai_port, process, log)
        yield
    finally:
        process.terminate()
        process.wait()


def config_of(arguments: argparse.Namespace, name: str, steps: int) -> Any:
    runs = arguments.groups * arguments.generations
    backend = {"ip": "127.0.0.1", "port": arguments.port, "name": name, "project": "bench"}
    agent = {name: getattr(arguments, name) for name in ("turns", "tokens", "latency")}
    llm = {
        "_type": "openai",
        "model_name": name,
        "base_url": f"http://127.0.0.1:{arguments.openai_port}/v1",
    }
    return {
        "llms": {"policy": llm},
        "workflow": {"_type": "bench.overlap:Tools", **agent},
        "eval": {
            # Enough for the groups of two steps: neither mode waits for a slot.
            "general": {
                "dataset": {"_type": "bench.overlap:questions"},
                "max_concurrency": 2 * runs,
            },
            "evaluators": {"reward": {"_type": "python", "function": "bench.overlap:reward"}},
        },
        "trajectory_builders": {
            "builder": {
                "_type": "openpipe_art_traj_builder",
                "num_generations": arguments.generations,
                "examples_per_epoch": arguments.groups,
            }
        },
        "trainer_adapters": {
            "backend": {
                "_type": "openpipe_art_trainer_adapter",
                "backend": {**backend, "base_model": arguments.base_model},
                "training": {"learning_rate": 1e-6},
            }
        },
        "trainers": {"trainer": {"_type": "openpipe_art_trainer"}},
        "finetuning": {
            "enabled": True,
            **{"trainer": "trainer", "trajectory_builder": "builder", "trainer_adapter": "backend"},
            "num_epochs": steps,
        },
    }


def run(
    arguments: argparse.Namespace, directory: Path, name: str, **settings: Any
) -> tuple[list[Any], dict[str, list[Interval]]]:
    """Train with the harness; return the rows of its epochs, and when each part was busy."""
    output = directory / name
    steps = settings.pop("steps", arguments.steps)
    config = config_of(arguments, name, steps)
    config["finetuning"] |= {"output_dir": str(output), **settings}
    config["eval"]["general"]["output_dir"] = str(output / "runs")
    file = directory / f"{name}.yaml"
    file.write_text(yaml.safe_dump(config))
    began = time.monotonic()
    result = asyncio.run(train(file))
    assert result is not None and result.history is not None
    rows = result.history.metrics
    assert len(rows) == steps and rows[-1]["step"] == steps
    busy: dict[str, list[Interval]] = {"engine": [], "learner": []}
    for line in (directory / "busy.jsonl").read_text().splitlines():
        kind, start, end = json.loads(line)
        if start >= began:
            busy[kind].append((start, end))
    return rows, busy


def union(intervals: list[Interval], window: Interval) -> list[Interval]:
    """Return the union of the intervals inside the window."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        begin, end = max(begin, window[0]), min(end, window[1])
        if begin >= end:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def seconds(intervals: list[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def both(first: list[Interval], second: list[Interval]) -> float:
    """Return the seconds in which both are busy."""
    moments = sorted({moment for interval in first + second for moment in interval})
    return sum(
        end - begin
        for begin, end in pairwise(moments)
        if all(any(a <= begin and end <= b for a, b in each) for each in (first, second))
    )


def measure(arguments: argparse.Namespace, engine: str, table: Table) -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        base = 0.0
        with serving(arguments, engine, directory):
            run(arguments, directory, "warm", steps=2)
            for ahead in (0, 1):
                name = f"ahead-{ahead}"
                rows, busy = run(arguments, directory, name, max_steps_off_policy=ahead)
                begin = min(start for start, _ in busy["engine"])
                end = max(end for _, end in busy["learner"])
                wall = end - begin
                sampling, training = (union(busy[kind], (begin, end)) for kind in busy)
                shared = both(sampling, training)
                either = seconds(sampling) + seconds(training) - shared
                base = base or wall
                stale = sum(row["failures"].get("stale", 0) for row in rows)
                trained = sum(row["num_trajectories"] for row in rows)
                shares = [seconds(sampling), seconds(training), either, shared]
                table.add(
                    [
                        *(engine, str(ahead), f"{wall / len(rows):.2f}"),
                        f"{3600 * len(rows) / wall:.0f}",
                        *(f"{share / wall:.0%}" for share in shares),
                        *(f"{trained / len(rows):.1f}", str(stale), f"{base / wall:.2f}x"),
                    ]
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--engine", nargs="+", choices=["embedded", "replay"])
    parser.add_argument("--base-model", default="tiny-random")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--groups", type=int, default=4, help="groups per step")
    parser.add_argument("--generations", type=int, default=8, help="runs per group")
    parser.add_argument("--turns", type=int, default=2, help="calls of the model per run")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens per call")
    parser.add_argument("--latency", type=float, default=1.0, help="scale of the tools' waits")
    parser.add_argument("--rate", type=float, default=30.0, help="tokens per second of a replay")
    parser.add_argument("--learner-s", type=float, default=0.0, help="least seconds of a step")
    parser.add_argument("--write", action="store_true", help="write bench/results/overlap.md")
    parser.add_argument("--port", type=int, default=18600 + os.getpid() % 1000)
    parser.add_argument("--openai-port", type=int, default=19600 + os.getpid() % 1000)
    for hidden in ("--serve", "--replay"):
        parser.add_argument(hidden, action="store_true", help=argparse.SUPPRESS)
    for hidden in ("--busy", "--state-dir"):
        parser.add_argument(hidden, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        return serve(arguments)
    table = Table(
        ["engine", "steps off-policy", "s/step", "steps/h", "engine busy", "learner busy",
         "either", "both", "runs/step", "stale runs", "speed-up"]
    )  # fmt: skip
    load = os.getloadavg()[0]
    for engine in arguments.engine or ["embedded", "replay"]:
        measure(arguments, engine, table)
    what = (
        f"{arguments.steps} steps of {arguments.groups} groups of {arguments.generations} runs, "
        f"each {arguments.turns} calls of at most {arguments.tokens} tokens to "
        f"`{arguments.base_model}` with tools of {MEDIAN_S * arguments.latency:g} s at the median "
        f"and {LONGEST_S * arguments.latency:g} s at most; a replayed stream has "
        f"{arguments.rate:g} tok/s, and a step takes at least {arguments.learner_s:g} s"
    )
    print(f"{what}\n\n{table}\n\n{machine(load)}")
    if arguments.write:
        write_report("overlap", what, table, load)


if __name__ == "__main__":
    main()
