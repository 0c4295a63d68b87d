"""A head in this process, and real `trainer engine` processes that join it on loopback."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from trainer.base_model.resolve import resolve
from trainer.engines.embedded import EmbeddedEngine
from trainer.machines.replicas import JoinSettings, Replicas

KEY = "sesame"
ENGINE_SETTINGS = {
    "base_model": "tiny-random",
    "engine": "embedded",
    "engine_args": {},
    "rank": 8,
    "engine_cards": None,
    "learner": None,
}


@asynccontextmanager
async def head(directory: Path) -> AsyncIterator[Replicas]:
    own = EmbeddedEngine(resolve("tiny-random"), log=directory / "own.log")
    join_settings = JoinSettings("127.0.0.1", 0, KEY, ENGINE_SETTINGS)
    replicas = Replicas(own, join_settings)
    await replicas.start()
    try:
        yield replicas
    finally:
        await replicas.stop()


@contextmanager
def node(replicas: Replicas, directory: Path, key: str = KEY) -> Iterator[subprocess.Popen[str]]:
    """Run `trainer engine`, and kill it at the end."""
    command = [sys.executable, "-m", "trainer", "engine", "--node-dir", str(directory / "node")]
    with subprocess.Popen(
        [*command, "--head", f"http://127.0.0.1:{replicas.port}"],
        env={**os.environ, "ART_API_KEY": key, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


async def wait_until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.02)


async def both_ready(replicas: Replicas) -> None:
    await wait_until(lambda: len(replicas._ready) == 2)
