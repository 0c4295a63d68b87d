"""Measures how soon a server trains: `trainer serve` until its first step is served, and its steps.

    git archive OLD | tar x -C /tmp/old      # an older version of this project
    python bench/startup.py --base-model DIR --tree /tmp/old . [--engine vllm] [--kept] [--write]

Each version starts as on a new machine, with nothing compiled; with `--kept` the last one starts a
second time with the compiled code that its bucket has kept. A step samples `groups` groups of
`size` answers over the OpenAI API, rewards them at random and trains on them over ART's protocol.
"""

import argparse
import asyncio
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.gateway import wait_until_served  # noqa: E402
from bench.loop_cuda import Batch, prepare, sample, train  # noqa: E402
from bench.report import Table, write_report  # noqa: E402
from kit.state_dir import COMPILED  # noqa: E402

KEPT = {"VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}


def tokens(batch: Batch) -> int:
    """The number of sampled tokens."""
    choices = [t["messages_and_choices"][-1] for group in batch[0] for t in group["trajectories"]]
    return sum(len(choice["logprobs"]["content"]) for choice in choices)


async def steps(arguments: argparse.Namespace, count: int) -> list[tuple[float, float, float]]:
    """Return when each step was served, its seconds, and its sampled tokens per second."""
    found = []
    async with httpx.AsyncClient(timeout=900) as client:
        model = await prepare(client, arguments)
        for _ in range(count):
            began = time.monotonic()
            batch = await sample(client, arguments, model)
            await train(client, arguments, model, batch)
            ended = time.monotonic()
            found.append((ended, ended - began, tokens(batch) / batch[1]))
    return found


def measure(
    arguments: argparse.Namespace, tree: Path, home: Path, count: int, kept: Path | None = None
) -> list[str]:
    """Train `count` steps with a version, on a machine that has nothing but `kept`."""
    state = arguments.state_dir = home / ".art"
    state.mkdir(parents=True)
    if kept is not None:
        shutil.copytree(kept, state / COMPILED)
    variables = {name: value for name, value in os.environ.items() if name not in KEPT}
    paths = os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])
    variables |= {"HOME": str(home), "ART_CACHE": str(home / "cache"), "PYTHONPATH": paths}
    variables |= {"ART_BUCKET": "bench"} if arguments.kept and tree == ROOT else {}
    given = {name: getattr(arguments, name) for name in ("engine", "base_model", "port")}
    given |= {"openai_port": arguments.openai_port, "state_dir": state}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    log = home / "server.log"
    began = time.monotonic()
    with log.open("wb") as output:
        command = [sys.executable, "-m", "trainer", "serve", *flags]
        process = subprocess.Popen(command, cwd=tree, env=variables, stdout=output, stderr=output)
    try:
        wait_until_served(arguments.openai_port, process, log)
        served = time.monotonic() - began
        found = asyncio.run(steps(arguments, count))
    finally:
        process.terminate()
        process.wait()
    times = [seconds for _, seconds, _ in found]
    rate = statistics.median(rate for *_, rate in found[1:])
    first = found[0][0] - began
    print(f"{tree.name}: served {served:.1f} s, first step {first:.1f} s, {found}", flush=True)
    shown = [f"{one:.1f}" for one in times] + [""] * (arguments.steps - count)
    return [f"{served:.1f}", f"{first:.1f}", *shown, f"{rate:.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--base-model", required=True)
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--tree", type=Path, nargs="+", default=[ROOT], help="versions to compare")
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--size", type=int, default=16, help="answers in a group")
    parser.add_argument("--prompt", type=int, default=400, help="words in a prompt")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--row", type=int, default=8192, help="tokens in a packed row")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--kept", action="store_true", help="start again with compiled code")
    parser.add_argument("--write", action="store_true", help="write bench/results/startup.md")
    parser.add_argument("--port", type=int, default=18600 + os.getpid() % 1000)
    parser.add_argument("--openai-port", type=int, default=19600 + os.getpid() % 1000)
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error("at least 2 steps: tokens per second are those of all but the first")
    each = [f"step {number} s" for number in range(1, arguments.steps + 1)]
    table = Table(["version", "compiled code", "served s", "first step served s", *each, "tok/s"])
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        trees = [tree.resolve() for tree in arguments.tree]
        for number, tree in enumerate(trees):
            # Of an older version only the first step counts, and the speed of sampling.
            count = arguments.steps if tree == trees[-1] else 2
            row = measure(arguments, tree, Path(folder) / str(number), count)
            table.add([tree.name, "none", *row])
        kept = Path(folder) / str(len(trees) - 1) / ".art" / COMPILED
        if arguments.kept:
            row = measure(arguments, trees[-1], Path(folder) / "kept", arguments.steps, kept)
            table.add([trees[-1].name, "kept", *row])
    what = (
        f"Steps of {arguments.groups} groups of {arguments.size} answers of at most "
        f"{arguments.tokens} tokens by `{Path(arguments.base_model).name}`, engine "
        f"{arguments.engine}; tokens per second are those of the steps after the first"
    )
    print(f"{what}\n\n{table}")
    if arguments.write:
        write_report("startup", what, table, load, packages=("torch", "vllm"))


if __name__ == "__main__":
    main()
