"""Load on one server: many chats at once beside training, and the memory of its processes."""

import asyncio
import contextlib
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from tests.faults.patient import MODEL, groups
from tests.processes import children
from tests.serving import Serving


def memory_mib(serving: Serving) -> dict[str, float]:
    """The resident memory of the server and its workers, by name."""
    found = {}
    for pid in [serving.process.pid, *children(serving.process.pid)]:
        with contextlib.suppress(OSError, StopIteration):  # it has ended
            command = Path(f"/proc/{pid}/cmdline").read_text()
            name = "engine" if "engines" in command else "learner"
            name = "server" if pid == serving.process.pid else name
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            found[name] = int(next(it for it in lines if it.startswith("VmRSS")).split()[1]) / 1024
    return found


async def load(serving: Serving, chats: int, seconds: float) -> dict[str, Any]:
    """Keep `chats` chats under way and train step after step; count answers by status."""
    until = time.monotonic() + seconds
    statuses: Counter[str] = Counter()
    memory: list[dict[str, float]] = []
    steps = 0
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=seconds + 300, limits=limits) as http:

        async def chat(number: int) -> None:
            ask = {"model": "run", "max_tokens": 8, "stream": number % 2 == 0}
            ask["messages"] = [{"role": "user", "content": f"question {number}"}]
            while time.monotonic() < until:
                answer = await http.post(f"{serving.openai}/v1/chat/completions", json=ask)
                statuses[str(answer.status_code)] += 1
                if answer.status_code == 429:
                    await asyncio.sleep(float(answer.headers.get("retry-after", 1)))

        async def train() -> None:
            nonlocal steps
            while time.monotonic() < until:
                body = {"model": MODEL, "trajectory_groups": groups(steps + 1)}
                answer = await http.post(f"{serving.control}/_train_model", json=body)
                answer.raise_for_status()
                steps += 1

        async def watch() -> None:
            while time.monotonic() < until:
                memory.append(memory_mib(serving))
                await asyncio.sleep(1)

        await asyncio.gather(train(), watch(), *(chat(number) for number in range(chats)))
    return {"answers": dict(statuses), "steps": steps, "memory": memory}


def window(memory: list[dict[str, float]], name: str) -> tuple[float, float]:
    """The median of a process's memory in the first and the last tenth of the time."""
    values = [row[name] for row in memory if name in row]
    part = max(1, len(values) // 10)
    return statistics.median(values[:part]), statistics.median(values[-part:])
