"""Measures the gateway's overhead: concurrent streams from an engine that replays tokens.

    python bench/gateway.py [--streams 64] [--rate 30] [--tokens 200] [--write]

The engine produces the tokens of every stream at a fixed rate, so that sampling is not measured.
Each token carries the time it was produced in place of its logprob. The client, in a separate
process, compares it with the time of arrival. There are two runs: streams at independent times, and
in lockstep, as a real engine decodes a batch. Goals: 95% of the engine's own throughput, and 3 ms
added at the median.
"""

import argparse
import asyncio
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.report import Table, machine, write_report  # noqa: E402
from trainer.engines.engine import Delta, SampleRequest  # noqa: E402

MODEL = "tiny-random"
LOGPROB = re.compile(rb'"logprob": ?(-?[\d.e+]+)')


class ReplayEngine:
    """Produces `tokens` tokens per stream at `rate` per second, each with its time as logprob."""

    name = "replay"
    running = True

    def __init__(self, rate: float, tokens: int, *, lockstep: bool) -> None:
        self._period = 1 / rate
        self._tokens = tokens
        self._lockstep = lockstep

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def configure(self, arguments: Mapping[str, Any]) -> None: ...

    async def make_room(self) -> bool:
        return False

    async def load(self, lora: str, path: Path) -> None: ...

    async def unload(self, lora: str) -> None: ...

    async def sample(self, request: SampleRequest) -> AsyncIterator[Delta]:
        due = time.monotonic()
        if self._lockstep:
            due = math.ceil(due / self._period) * self._period
        for index in range(self._tokens):
            due += self._period
            await asyncio.sleep(due - time.monotonic())
            finish = "length" if index == self._tokens - 1 else None
            token = 97 + index % 26
            yield Delta(0, [token], [-time.monotonic()], chr(token), finish)  # type: ignore[arg-type]


def serve(arguments: argparse.Namespace) -> None:
    """Run the gateway's process: `trainer serve` with the replaying engine."""
    from trainer.config import ServerConfig
    from trainer.server.app import serve

    engine = ReplayEngine(arguments.rate, arguments.tokens, lockstep=arguments.lockstep)
    config = ServerConfig(
        base_model=MODEL,
        engine="embedded",
        port=0,
        openai_port=arguments.serve,
        state_dir=arguments.state,
    )
    serve(config, wrap_engine=lambda inner, directory: engine)  # type: ignore[arg-type,return-value]


async def own(arguments: argparse.Namespace, *, lockstep: bool) -> float:
    """Tokens per second of the engine without the gateway."""
    engine = ReplayEngine(arguments.rate, arguments.tokens, lockstep=lockstep)

    async def stream() -> list[float]:
        return [-d.logprobs[0] async for d in engine.sample(SampleRequest([1], stream=True))]

    times = await asyncio.gather(*(stream() for _ in range(arguments.streams)))
    return throughput([moment for stream_times in times for moment in stream_times])


async def through(arguments: argparse.Namespace, port: int) -> tuple[float, list[float]]:
    """Tokens per second through the gateway, and the delay of each token in seconds."""
    body = json.dumps(
        {"model": MODEL, "messages": [{"role": "user", "content": "Go"}], "stream": True}
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode()

    async def stream() -> list[tuple[float, float]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + body)
        found = []
        while line := await reader.readline():
            if line.startswith(b"data: {") and (produced := LOGPROB.search(line)):
                arrived = time.monotonic()
                found.append((arrived, arrived + float(produced[1])))
        writer.close()
        assert len(found) == arguments.tokens, f"{len(found)} tokens arrived"
        return found

    streams = await asyncio.gather(*(stream() for _ in range(arguments.streams)))
    rows = [row for found in streams for row in found]
    return throughput([arrived for arrived, _ in rows]), [late for _, late in rows]


def throughput(times: list[float]) -> float:
    return (len(times) - 1) / (max(times) - min(times))


def measure(arguments: argparse.Namespace, *, lockstep: bool) -> list[str]:
    alone = asyncio.run(own(arguments, lockstep=lockstep))
    with tempfile.TemporaryDirectory() as directory:
        port = 18600 + os.getpid() % 1000
        command = [
            *(sys.executable, __file__, "--serve", str(port), "--state", directory),
            *("--rate", str(arguments.rate), "--tokens", str(arguments.tokens)),
            *(["--lockstep"] if lockstep else []),
        ]
        with (Path(directory) / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_until_served(port, process, Path(directory) / "log")
            asyncio.run(through(arguments, port))  # warm up
            before = cpu_seconds(process.pid)
            served, late = asyncio.run(through(arguments, port))
            spent = cpu_seconds(process.pid) - before
        finally:
            process.terminate()
            process.wait()
    ranked = sorted(late)
    return [
        "in lockstep" if lockstep else "independent",
        f"{alone:,.0f}",
        f"{served:,.0f}",
        f"{served / alone:.1%}",
        f"{statistics.median(late) * 1e3:.2f}",
        f"{ranked[int(len(ranked) * 0.99)] * 1e3:.2f}",
        f"{spent / len(late) * 1e6:.0f}",
    ]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_until_served(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    while process.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/v1/models").json()["data"]:
                return
        except httpx.TransportError:
            pass  # it does not listen yet
        time.sleep(0.2)
    sys.exit(log.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=30, help="tokens per second per stream")
    parser.add_argument("--tokens", type=int, default=200, help="tokens per stream")
    parser.add_argument("--write", action="store_true", help="write bench/results/gateway.md")
    for hidden in ("--serve", "--state"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--lockstep", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        arguments.serve = int(arguments.serve)
        serve(arguments)
        return
    table = Table(
        ["streams", "engine tok/s", "gateway tok/s", "share", "p50 ms", "p99 ms", "CPU us/token"]
    )
    load = os.getloadavg()[0]
    for lockstep in (False, True):
        table.add(measure(arguments, lockstep=lockstep))
    what = (
        f"{arguments.streams} streams of {arguments.tokens} tokens, {arguments.rate:g} tok/s each"
    )
    print(f"{what}\n\n{table}\n\n{machine(load)}")
    if arguments.write:
        write_report("gateway", what, table, load)


if __name__ == "__main__":
    main()
