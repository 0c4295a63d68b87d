"""Measures what sampling ahead is worth: agents that wait for tools, with 0 and 1 steps off-policy.

    python bench/overlap.py [--engine embedded replay] [--steps 12] [--groups 4] [--latency 1]
    python bench/overlap.py --engine replay --learner-s 6 --write
    python bench/overlap.py --engine vllm vllm+mps --base-model DIR --latency 0 1 --steps 6 4

The harness trains an agent that calls the model in turns and waits for a tool after each: the
waits are lognormal with a median of 2 s, cut at 30 s, times `--latency`. `embedded` and `vllm` are
real engines; `+mps` and `+fp8` are settings of the server. `replay` answers with what the embedded
engine sampled at first, and sleeps for as long as `--rate` tokens per second would take, so that
sampling needs no core; `--learner-s` makes each step take at least that long. The engine is busy
while it samples at least one request, the learner while it trains a step. Times are from the end of
the first step to the end of the last but one, or as many steps before that as it samples ahead: a
long run hardly has more of its beginning, when nothing trains, and of its end, when nothing is
sampled.
"""

import argparse
import asyncio
import itertools
import json
import math
import os
import random
import re
import statistics
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

    def __init__(self, turns: int, tokens: int, spread: float, latency: float, prompt: int) -> None:
        self._turns = turns
        self._tokens = tokens * (1 - spread), tokens * (1 + spread)
        self._told = " The tool said something." * (prompt // 5)
        self._latency = latency
        self._runs: dict[str, int] = {}

    async def __call__(self, example: Any, llm: Any) -> str:
        number = self._runs[example.id] = self._runs.get(example.id, 0) + 1
        waits = random.Random(f"{example.id}/{number}")
        messages = [{"role": "user", "content": example.question + self._told}]
        message: Any = {}
        for _ in range(self._turns):
            message = await llm.chat(messages, max_tokens=round(waits.uniform(*self._tokens)))
            wait = min(LONGEST_S, waits.lognormvariate(math.log(MEDIAN_S), SPREAD))
            await asyncio.sleep(wait * self._latency)
            text = {"role": "assistant", "content": message["content"]}
            told = f"The tool took {wait:.1f} s. Go on.{self._told}"
            messages += [text, {"role": "user", "content": told}]
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
    names = ("base_model", "port", "openai_port", "tokens", "rate", "learner_s", "rank")
    given = [f"--{name.replace('_', '-')}={getattr(arguments, name)}" for name in names]
    given.append(f"--engine-args={json.dumps(arguments.engine_args)}")
    files = [f"--busy={directory / 'busy.jsonl'}", f"--state-dir={directory / '.art'}"]
    log = directory / "server.log"
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, __file__, f"--serve={engine}", *given, *files],
            stdout=output,
            stderr=output,
        )
    try:
        wait_until_served(arguments.openai_port, process, log)
        print(f"{engine}: served after {time.monotonic() - began:.1f} s", flush=True)
        yield
    finally:
        process.terminate()
        process.wait()


def config_of(
    arguments: argparse.Namespace,
    name: str,
    steps: int,
    latency: float,
    prompt: int,
    at_once: int | None,
) -> Any:
    runs = arguments.groups * arguments.generations
    backend = {"ip": "127.0.0.1", "port": arguments.port, "name": name, "project": "bench"}
    agent = {name: getattr(arguments, name) for name in ("turns", "tokens", "spread")}
    training = {"learning_rate": 1e-6, "packed_sequence_length": arguments.row}
    training["grad_accumulation_sequences"] = arguments.accumulate
    llm = {
        "_type": "openai",
        "model_name": name,
        "base_url": f"http://127.0.0.1:{arguments.openai_port}/v1",
    }
    return {
        "llms": {"policy": llm},
        "workflow": {"_type": "bench.overlap:Tools", **agent, "latency": latency, "prompt": prompt},
        "eval": {
            # By default enough for the groups of two steps: neither mode waits for a slot.
            "general": {
                "dataset": {"_type": "bench.overlap:questions"},
                "max_concurrency": at_once or 2 * runs,
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
                "training": training,
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
    steps = settings.pop("steps")
    agent = {key: settings.pop(key) for key in ("latency", "prompt", "at_once")}
    config = config_of(arguments, name, steps, **agent)
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


def medians(rows: list[Any]) -> dict[str, float]:
    """Return the median of each of the steps' times."""
    names = [name for name in rows[0] if name.startswith("time/")]
    return {name: round(statistics.median(row[name] for row in rows), 2) for name in names}


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


def parts(busy: dict[str, list[Interval]]) -> Iterator[str]:
    """Say of each step how long the learner waited and trained, and beside how many requests."""
    before = None
    for number, (begin, end) in enumerate(sorted(busy["learner"]), 1):
        waited, before = begin - (before or begin), end
        beside = [(max(a, begin), min(b, end)) for a, b in busy["engine"] if a < end and b > begin]
        requests = seconds(beside) / (end - begin)
        trained = f"trained {end - begin:.1f} s beside {requests:.0f} requests"
        yield f"step {number}: waited {waited:.1f} s, {trained}"


def measure(arguments: argparse.Namespace, engine: str, table: Table) -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        base = 0.0
        runs_of_a_step = arguments.groups * arguments.generations
        with serving(arguments, engine, directory):
            rows = []
            if arguments.warm:
                settings = {"latency": 0, "prompt": arguments.prompt[0], "at_once": None}
                rows, _ = run(arguments, directory, "warm", steps=arguments.warm, **settings)
            for number, row in enumerate(rows, 1):
                print(f"{engine}, step {number}: {medians([row])}", flush=True)
            cases = zip(arguments.latency, itertools.cycle(arguments.steps), strict=False)
            for (latency, steps), prompt, ahead, at_once, pin in itertools.product(
                cases, arguments.prompt, arguments.ahead, arguments.concurrency, arguments.pin_runs
            ):
                if pin and not ahead:
                    continue
                name = f"latency-{latency:g}-prompt-{prompt}-ahead-{ahead}-{at_once}-{pin}"
                settings = {"latency": latency, "prompt": prompt, "max_steps_off_policy": ahead}
                settings |= {"steps": steps, "at_once": at_once}
                if pin:
                    settings["pin_runs"] = True
                rows, busy = run(arguments, directory, name, **settings)
                print(f"{engine}, {name}: {medians(rows)}", *parts(busy), sep="\n", flush=True)
                ends = sorted(end for _, end in busy["learner"])
                begin, end = ends[0], ends[-2 - ahead]
                wall, counted = end - begin, len(ends) - 2 - ahead
                sampling, training = (union(busy[kind], (begin, end)) for kind in busy)
                shared = both(sampling, training)
                either = seconds(sampling) + seconds(training) - shared
                base = wall / counted if ahead == 0 else base
                stale = sum(row["failures"].get("stale", 0) for row in rows)
                trained = sum(row["num_trajectories"] for row in rows)
                shares = [seconds(sampling), seconds(training), either, shared]
                table.add(
                    [
                        *(engine, str(prompt), f"{MEDIAN_S * latency:g} s", str(ahead)),
                        *(str(at_once or 2 * runs_of_a_step), "yes" if pin else "no"),
                        f"{wall / counted:.2f}",
                        f"{3600 * counted / wall:.0f}",
                        *(f"{share / wall:.0%}" for share in shares),
                        *(f"{trained / len(rows):.1f}", str(stale)),
                        f"{base * counted / wall:.2f}x" if base else "",
                    ]
                )
                print(table, flush=True)


def engine_name(text: str) -> str:
    if not re.fullmatch(r"embedded|replay|vllm(\+(mps|fp8))*", text):
        raise argparse.ArgumentTypeError(f"`{text}` is not embedded, replay or vllm[+mps][+fp8]")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--engine", nargs="+", type=engine_name, default=["embedded", "replay"])
    parser.add_argument("--base-model", default="tiny-random")
    parser.add_argument("--steps", type=int, nargs="+", default=[12], help="for each latency")
    parser.add_argument("--groups", type=int, default=4, help="groups per step")
    parser.add_argument("--generations", type=int, default=8, help="runs per group")
    parser.add_argument("--turns", type=int, default=2, help="calls of the model per run")
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=[None], help="runs at once; two steps' runs"
    )
    parser.add_argument("--tokens", type=int, default=64, help="most tokens per call")
    parser.add_argument(
        "--spread", type=float, default=0.0, help="how far a call's tokens may differ, as a share"
    )
    parser.add_argument(
        "--prompt", type=int, nargs="+", default=[0], help="more words per message to the model"
    )
    parser.add_argument(
        "--engine-args", type=json.loads, default={}, help="more settings of vLLM, as JSON"
    )
    parser.add_argument("--row", type=int, help="tokens in a packed row")
    parser.add_argument("--accumulate", type=int, help="packed rows in one gradient step")
    parser.add_argument("--rank", type=int, default=8, help="rank of the LoRA")
    parser.add_argument("--latency", type=float, nargs="+", default=[1.0], help="of the tools")
    parser.add_argument("--ahead", type=int, nargs="+", default=[0, 1], help="steps off-policy")
    parser.add_argument(
        "--pin-runs", type=int, nargs="+", default=[0], help="1 samples each run from one step"
    )
    parser.add_argument("--warm", type=int, default=2, help="steps before those that count")
    parser.add_argument("--rate", type=float, default=30.0, help="tokens per second of a replay")
    parser.add_argument("--learner-s", type=float, default=0.0, help="least seconds of a step")
    parser.add_argument("--write", nargs="?", const="overlap", help="write bench/results/NAME.md")
    parser.add_argument("--port", type=int, default=18600 + os.getpid() % 1000)
    parser.add_argument("--openai-port", type=int, default=19600 + os.getpid() % 1000)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    for hidden in ("--busy", "--state-dir"):
        parser.add_argument(hidden, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if min(arguments.steps) < 4 + max(arguments.ahead):
        parser.error("at least 4 steps more than sampled ahead: the first and last do not count")
    if arguments.serve:
        return serve(arguments)
    table = Table(
        ["engine", "words", "tools", "steps off-policy", "at once", "pinned", "s/step", "steps/h",
         "engine busy", "learner busy", "either", "both", "runs/step", "stale runs", "speed-up"]
    )  # fmt: skip
    load = os.getloadavg()[0]
    for engine in arguments.engine:
        measure(arguments, engine, table)
    spread = f", give or take {arguments.spread:.0%}," if arguments.spread else ""
    tokens = f"{arguments.tokens}{spread}"
    what = (
        f"{' or '.join(map(str, arguments.steps))} steps of {arguments.groups} groups of "
        f"{arguments.generations} runs, "
        f"each {arguments.turns} calls of at most {tokens} tokens to "
        f"`{Path(arguments.base_model).name}` with tools of this median, at most "
        f"{LONGEST_S / MEDIAN_S:g} times as long"
    )
    if "replay" in arguments.engine:
        what += f"; a replayed stream has {arguments.rate:g} tok/s"
    if arguments.learner_s:
        what += f"; a step takes at least {arguments.learner_s:g} s"
    packages = (
        ("torch", "vllm") if "vllm" in arguments.engine[0] else ("torch", "fastapi", "uvicorn")
    )
    print(f"{what}\n\n{table}\n\n{machine(load, packages)}")
    if arguments.write:
        write_report(arguments.write, what, table, load, packages=packages)


if __name__ == "__main__":
    main()
