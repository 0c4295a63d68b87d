"""What several machines cost and give: routing, LoRAs that reach every machine, and throughput.

    python bench/nodes.py                  a table
    python bench/nodes.py --write          also writes bench/results/nodes.md

Each machine is a Ray node with an address of its own on loopback. Its engine replays tokens at a
fixed rate, so that the cores of this computer are not what limits sampling: 64 choices at once,
each a token every 50 ms. A token carries the time at which it was made, so that the wait on its
way to the server is known. Everything shares the cores here; on real machines it would not.
"""

import argparse
import asyncio
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from trainer.config import ServerConfig
from trainer.engines.engine import Delta, SampleRequest

SLOTS, INTERVAL = 64, 0.05
"""Choices that an engine samples at once, and the seconds that a token takes."""
STREAMS, TOKENS = 256, 40
LORA_BYTES = 100_000_000
KEY = "bench"


class ReplayEngine:
    """Gives tokens at a fixed rate; loading a LoRA costs nothing."""

    name = "replay"
    running = True

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(SLOTS)

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def configure(self, arguments: Mapping[str, Any]) -> None: ...

    async def make_room(self) -> bool:
        return False

    async def load(self, lora: str, path: Path) -> None: ...

    async def unload(self, lora: str) -> None: ...

    async def sample(self, request: SampleRequest) -> AsyncIterator[Delta]:
        async with self._slots:
            if not request.stream:
                await asyncio.sleep(INTERVAL)
                tokens = list(range(request.max_tokens or 1))
                logprobs = [-0.12345678] * len(tokens)
                yield Delta(0, tokens, logprobs, "word " * len(tokens), finish_reason="stop")
                return
            for number in range(request.max_tokens or 1):
                await asyncio.sleep(INTERVAL)
                last = number + 1 == request.max_tokens
                yield Delta(0, [number], [time.monotonic()], finish_reason="stop" if last else None)


def request() -> SampleRequest:
    return SampleRequest([1] * 200, max_tokens=TOKENS, stream=True)


async def waits(engine: Any, streams: int) -> list[float]:
    """How long each token of several streams was on its way, in milliseconds."""
    found: list[float] = []

    async def one() -> None:
        async with aclosing(engine.sample(request())) as deltas:
            async for delta in deltas:
                found.append(1000 * (time.monotonic() - delta.logprobs[0]))

    await asyncio.gather(*(one() for _ in range(streams)))
    return found


async def measure(replicas: Any, lora: Path) -> dict[str, float]:
    """All figures of the machines that `replicas` has now."""
    began = time.monotonic()
    await replicas.load("bench@1", lora)
    figures = {"LoRA of 100 MB, s": time.monotonic() - began}
    await replicas.unload("bench@1")
    began, used = time.monotonic(), time.process_time()
    found = await waits(replicas, STREAMS)
    figures["tokens a second"] = len(found) / (time.monotonic() - began)
    figures["server's CPU, us a streamed token"] = 1e6 * (time.process_time() - used) / len(found)
    cuts = statistics.quantiles(found, n=100)
    figures |= {"wait of a token, p50 ms": cuts[49], "p99 ms": cuts[98]}
    used = time.process_time()
    await asyncio.gather(*(whole(replicas) for _ in range(STREAMS)))
    cpu = 1e6 * (time.process_time() - used) / STREAMS
    return {**figures, "server's CPU, us a choice of 512 tokens": cpu}


async def whole(engine: Any) -> None:
    """Sample a choice that arrives as a whole."""
    async with aclosing(engine.sample(SampleRequest([1] * 1000, max_tokens=512))) as deltas:
        async for _ in deltas:
            pass


def new_lora(directory: Path) -> Path:
    """Files of the size of a large LoRA, which no machine has yet."""
    path = Path(tempfile.mkdtemp(dir=directory))
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").write_bytes(os.urandom(LORA_BYTES))
    return path


async def until_ready(replicas: Any, number: int) -> None:
    async with asyncio.timeout(300):
        while len(replicas._ready) != number:
            await asyncio.sleep(0.05)


@contextmanager
def ray_machines(number: int, directory: Path) -> Iterator[str]:
    """Start a Ray head and `number` machines; yields the head's address."""
    from trainer.machines.ray_cluster import token_for

    temporary = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token_for(KEY)}
    head = "127.88.0.1:6399"
    processes = []

    def start(address: str, *arguments: str) -> None:
        place = directory / address
        place.mkdir()
        options = ("--node-ip-address", address, "--temp-dir", temporary, "--num-gpus=0")
        quiet = ("--disable-usage-stats", "--include-log-monitor=false")
        ray = str(Path(sys.executable).with_name("ray"))
        with (place / "log").open("wb") as log:
            command = [ray, "start", "--block", *arguments, *options, *quiet]
            store = "--object-store-memory=400000000"
            processes.append(subprocess.Popen([*command, store], cwd=place, stdout=log, stderr=log))
        while "Ray runtime started" not in (place / "log").read_text():
            assert processes[-1].poll() is None, (place / "log").read_text()
            time.sleep(0.1)

    try:
        alone = ("--num-cpus=0", "--no-monitor", "--include-dashboard=false")
        start("127.88.0.1", "--head", "--port", "6399", *alone)
        for place in range(number):
            start(f"127.88.0.{place + 2}", "--address", head, "--num-cpus=1")
        yield head
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait()
        shutil.rmtree(temporary, ignore_errors=True)


@asynccontextmanager
async def on_ray(number: int, directory: Path) -> AsyncIterator[Any]:
    """The engines of `number` machines behind one address, without one of this machine."""
    from trainer.machines.machine_actor import MachineActor
    from trainer.machines.ray_cluster import connect
    from trainer.machines.replicas import Replicas

    class ReplayMachine(MachineActor):
        create_engine = staticmethod(lambda *_, **__: ReplayEngine())

    with ray_machines(number, directory) as address:
        cluster = await asyncio.to_thread(connect, address, KEY)
        config = ServerConfig(engine="embedded")
        replicas = Replicas(ReplayEngine(), config, "tiny-random", cluster, kind=ReplayMachine)
        await replicas.start()
        try:
            await until_ready(replicas, number + 1)
            replicas._own.busy = sys.maxsize  # it gets no request
            yield replicas
        finally:
            await replicas.stop()


async def figures(number: int) -> dict[str, float]:
    directory = Path(tempfile.mkdtemp())
    try:
        async with on_ray(number, directory) as replicas:
            await measure(replicas, new_lora(directory))  # the first of everything is slower
            return await measure(replicas, new_lora(directory))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def table(columns: Mapping[str, Mapping[str, float]]) -> str:
    names = list(next(iter(columns.values())))
    rows = ["| | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
    for name in names:
        cells = [f"{column[name]:,.2f}" for column in columns.values()]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write bench/results/nodes.md")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    columns = {f"Ray, {it}": asyncio.run(figures(it)) for it in (1, 4)}
    print(table(columns))
    if arguments.write:
        text = f"# Several machines\n\n`python bench/nodes.py`\n\n{table(columns)}\n"
        (Path(__file__).parent / "results" / "nodes.md").write_text(text)


if __name__ == "__main__":
    main()
