"""Starting vLLM: once for all who need it, and with the learner beside it."""

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.base_model.resolve import resolve
from trainer.engines import vllm_args
from trainer.engines.vllm import VllmEngine
from trainer.engines.vllm_process import VllmProcess
from trainer.errors import TrainerError
from trainer.server.workers import _start_learner


async def test_a_dead_vllm_is_started_once_for_all_who_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = VllmEngine(
        resolve("tiny-random"), program=[], log=tmp_path / "log", rank=8, cuda=False, arguments={}
    )
    starts = []

    async def start() -> None:
        starts.append(engine)
        await asyncio.sleep(0)  # the others come while it starts
        engine._process = SimpleNamespace(running=True)

    monkeypatch.setattr(engine, "_start", start)
    await asyncio.gather(*(engine.start() for _ in range(3)))
    assert len(starts) == 1


PROGRAM = """
import http.server, os, socketserver, sys, time
print("GPU KV cache size: 1,014,592 tokens", flush=True)
go_on, socket = sys.argv[1:3]
while not os.path.exists(go_on):
    time.sleep(0.01)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def address_string(self):
        return "local"
socketserver.ThreadingUnixStreamServer(socket, Handler).serve_forever()
"""


async def test_the_learner_loads_as_soon_as_vllm_has_reserved_its_memory(tmp_path: Path) -> None:
    process = VllmProcess([sys.executable, "-c", PROGRAM], log=tmp_path / "engine.log")
    go_on, reserved = tmp_path / "go-on", asyncio.Event()
    done: list[str] = []

    class Learner:
        def __getattr__(self, name: str) -> Any:
            async def call() -> None:
                done.append(name)

            return call

    starting = asyncio.create_task(
        process.start(lambda socket: [str(go_on), str(socket)], {}, reserved)
    )
    learner: Any = Learner()
    learning = asyncio.create_task(_start_learner(learner, reserved))
    await asyncio.sleep(0)
    assert done == ["start", "warm_up"]
    await learning
    assert done == ["start", "warm_up", "load"]
    assert not starting.done()
    go_on.touch()
    try:
        await starting
    finally:
        await process.stop()


async def test_the_first_lora_on_a_gpu_compiles_what_its_requests_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    posted: list[tuple[str, Any]] = []

    class Process:
        running, asleep = True, False

        async def post(self, path: str, body: Any) -> None:
            posted.append((path, body))
            if len(posted) == 2:
                raise TrainerError("too long")

    monkeypatch.setattr(vllm_args, "rank_of", lambda _: 8)
    for cuda in (True, False):
        engine: Any = VllmEngine(
            resolve("tiny-random"), program=[], log=tmp_path, rank=8, cuda=cuda, arguments={}
        )
        engine._process, engine._context = Process(), 2010
        for lora in ("run@1", "run@2"):
            await engine.load(lora, tmp_path)
    paths = [path.rsplit("/", 1)[1] for path, _ in posted]
    load, complete = "load_lora_adapter", "completions"
    assert paths == [load, *[complete] * 4, load, load, load]
    prompts = [body["prompt"] for path, body in posted if path.endswith(complete)]
    assert [len(prompt) for prompt in prompts] == [2000, 1985, 512, 501]
    assert [len(prompt) % 16 == 0 for prompt in prompts] == [True, False] * 2
    assert len({prompt[0] for prompt in prompts}) == 4
