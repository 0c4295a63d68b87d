"""Compares the tokens per second of the embedded engine, `transformers.generate` and vLLM on a CPU.

    python bench/engine.py --vllm .cache/vllm-cpu [--batch 16] [--tokens 64] [--write]

The three take turns, round by round, so that other load on the machine affects all alike. The
median round counts. Tokens per second of CPU time are reported as well, because they are more
reliable on a busy machine. All use the same number of prompt and new tokens, the same precision and
the same number of threads. transformers comes from the environment that `scripts/vllm-cpu-env`
creates. Goal: at batch 16 the embedded engine gives at least 1.5 times the tokens of transformers.

`with a schema` is the same engine when every choice must match a JSON schema: what structured
output costs. vLLM computes the policy's own logprobs of such choices in a second request.

The time to load a LoRA into an engine is reported too; `--rounds 0` measures only that. Goal: 0.2 s
for vLLM.
"""

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.report import Table, machine, write_report  # noqa: E402
from trainer.base_model import smollm2  # noqa: E402
from trainer.base_model.precision import dtype_name  # noqa: E402
from trainer.base_model.resolve import resolve  # noqa: E402
from trainer.config import LoraConfig  # noqa: E402
from trainer.engines.choose import vllm_program  # noqa: E402
from trainer.engines.embedded import EmbeddedEngine  # noqa: E402
from trainer.engines.engine import Constraint, SampleRequest  # noqa: E402
from trainer.engines.vllm import VllmEngine  # noqa: E402
from trainer.learner.process import LearnerProcess  # noqa: E402


def transformers(python: Path, model: Path, prompts: list[list[int]], tokens: int) -> Any:
    program = Path(__file__).with_name("transformers_generate.py")
    dtype = dtype_name(model, cuda=False)
    return subprocess.Popen(
        [python, program, model, json.dumps(prompts), str(tokens), dtype],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@dataclass
class Round:
    tokens: int
    seconds: float
    cpu_seconds: float


async def generate(process: Any) -> Round:
    before = cpu_seconds(process.pid)
    process.stdin.write("go\n")
    process.stdin.flush()
    result = json.loads(await asyncio.to_thread(process.stdout.readline))
    return Round(result["tokens"], result["seconds"], cpu_seconds(process.pid) - before)


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and its descendants."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return own + sum(cpu_seconds(int(child)) for child in children)


# No choice reaches its end, so that free and constrained choices have the same length.
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "role": {"enum": ["admin", "editor", "reader"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "role", "tags"],
    "additionalProperties": False,
}
SCHEMA = Constraint("json_schema", json.dumps({"type": "array", "minItems": 99, "items": PERSON}))


async def sample(
    engine: Any, prompts: list[list[int]], tokens: int, constraint: Constraint | None = None
) -> Round:
    process = engine._worker if isinstance(engine, EmbeddedEngine) else engine._process._process

    async def one(prompt: list[int]) -> int:
        request = SampleRequest(prompt, max_tokens=tokens, constraint=constraint)
        return sum([len(delta.token_ids) async for delta in engine.sample(request)])

    start, before = time.perf_counter(), cpu_seconds(process.pid)
    counts = await asyncio.gather(*(one(prompt) for prompt in prompts))
    return Round(sum(counts), time.perf_counter() - start, cpu_seconds(process.pid) - before)


async def load_loras(engine: Any, loras: list[Path]) -> list[float]:
    """Seconds until each LoRA, with its own name and path, can be requested."""
    taken = []
    for place, path in enumerate(loras):
        start = time.perf_counter()
        await engine.load(f"bench@{place}", path)
        taken.append(time.perf_counter() - start)
    return taken[1:]  # the first load also initialises the loader


async def make_loras(name: str, directory: Path, count: int = 9) -> list[Path]:
    """Copies of a LoRA of rank 8 on every linear layer, written by the learner."""
    learner = LearnerProcess(name, log=directory / "learner.log")
    await learner.start()
    try:
        step = await learner.prepare(directory / "checkpoints", LoraConfig())
    finally:
        await learner.stop()
    made = directory / "checkpoints" / f"{step:04d}"
    return [Path(shutil.copytree(made, directory / f"lora-{n}")) for n in range(count)]


async def measure(
    arguments: argparse.Namespace, model: Path
) -> tuple[dict[str, list[Round]], dict[str, list[float]]]:
    random = np.random.RandomState(1)
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]

    def fresh() -> list[list[int]]:
        """New prompts, which no prefix cache contains."""
        drawn = random.randint(20, min(vocabulary, 10_000), (arguments.batch, arguments.prompt))
        return [[int(token) for token in row] for row in drawn]

    logs = Path(tempfile.mkdtemp(prefix="bench-engine-"))
    embedded = EmbeddedEngine(model, log=logs / "embedded.log")
    vllm = VllmEngine(
        model,
        program=vllm_program(arguments.vllm),
        log=logs / "vllm.log",
        rank=8,
        cuda=False,
        arguments={"max_model_len": 2048, "max_loras": 1, "max_cpu_loras": 1},
    )
    python = Path(vllm_program(arguments.vllm)[0])
    loras = await make_loras(arguments.model, logs)
    baseline = transformers(python, model, fresh(), arguments.tokens)
    engines = {"embedded": embedded, "vLLM": vllm}
    names = [name for engine in engines for name in (engine, f"{engine} with a schema")]
    found: dict[str, list[Round]] = {name: [] for name in ("transformers.generate", *names)}
    try:
        await asyncio.gather(embedded.start(), vllm.start())
        for engine in (embedded, vllm):
            await sample(engine, fresh(), 4)  # warm up
            await sample(engine, fresh(), 4, SCHEMA)
        for _ in range(arguments.rounds):
            found["transformers.generate"].append(await generate(baseline))
            for name, engine in engines.items():
                free = await sample(engine, fresh(), arguments.tokens)
                found[name].append(free)
                constrained = await sample(engine, fresh(), arguments.tokens, SCHEMA)
                found[f"{name} with a schema"].append(constrained)
        loads = {name: await load_loras(engine, loras) for name, engine in engines.items()}
    finally:
        baseline.kill()
        await asyncio.gather(embedded.stop(), vllm.stop())
    return found, loads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--vllm", required=True, help="environment with vLLM and transformers")
    default = smollm2.NAME if smollm2.is_installed() else "tiny-random"
    parser.add_argument("--model", default=default)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=64, help="tokens in a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--write", action="store_true", help="write bench/results/engine.md")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    model = resolve(arguments.model)
    load = os.getloadavg()[0]
    found, loads = asyncio.run(measure(arguments, model))
    table = Table(["engine", "tok/s (median)", "vs transformers", "tok/CPU s", "vs transformers"])
    base: tuple[float, float] | None = None
    for name, rounds in found.items() if arguments.rounds else ():
        wall = statistics.median(round.tokens / round.seconds for round in rounds)
        cpu = statistics.median(round.tokens / round.cpu_seconds for round in rounds)
        base = base or (wall, cpu)
        table.add(
            [name, f"{wall:.1f}", f"{wall / base[0]:.2f}x", f"{cpu:.1f}", f"{cpu / base[1]:.2f}x"]
        )
    what = (
        f"`{arguments.model}`, {dtype_name(model, cuda=False)}, batch {arguments.batch}, prompts "
        f"of {arguments.prompt} tokens, {arguments.tokens} new tokens, {arguments.threads} threads"
    )
    loading = Table(["LoRA load into", "median ms", "max ms"])
    for name, taken in loads.items():
        loading.add([name, f"{statistics.median(taken) * 1e3:.0f}", f"{max(taken) * 1e3:.0f}"])
    print(f"{what}\n\n{table}\n\n{loading}\n\n{machine(load, ['torch'])}")
    if arguments.write:
        write_report("engine", what, table, load, notes=str(loading))


if __name__ == "__main__":
    main()
