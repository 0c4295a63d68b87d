"""What closes the gate, or keeps it from closing, does so only while the engine is concerned."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from trainer.config import LoraConfig, ServerConfig
from trainer.engines.engine import Delta, SampleRequest
from trainer.server import canary
from trainer.server.gate import Gate
from trainer.server.model import Model
from trainer.server.workers import Workers, _Started


class Prompts:
    def apply_chat_template(self, messages: Any) -> list[int]:
        return [1, 2]


class Engine:
    def __init__(self) -> None:
        self.configured: list[Any] = []

    async def sample(self, request: SampleRequest) -> AsyncIterator[Delta]:
        yield Delta(0, token_ids=[3], logprobs=[-1.0], finish_reason="length")

    async def configure(self, arguments: Any) -> None:
        self.configured.append(arguments)


class SilentEngine(Engine):
    """Never answers."""

    async def sample(self, request: SampleRequest) -> AsyncIterator[Delta]:
        await asyncio.Event().wait()
        yield Delta(0)


class BusyLearner:
    """Scores once its step has trained."""

    def __init__(self) -> None:
        self.asked, self.trained = asyncio.Event(), asyncio.Event()

    async def score(self, *_: Any) -> list[float]:
        self.asked.set()
        await self.trained.wait()
        return [-1.5]


async def test_the_gate_may_close_while_a_check_waits_for_the_learner() -> None:
    gate, engine, learner = Gate(), Engine(), BusyLearner()
    model = Model("p", "m", Path("m"), LoraConfig())
    engine_done = asyncio.Event()
    arguments: Any = (engine, learner, Prompts(), model, 1, 0.1, gate, engine_done)
    check = asyncio.create_task(canary.check(*arguments))
    async with asyncio.timeout(30):
        await engine_done.wait()  # whatever the learner does
        await learner.asked.wait()
        async with gate.closed():
            learner.trained.set()
        assert (await check)["canary/logprob_difference"] == 0.5


async def test_nobody_waits_for_a_check_while_others_sample() -> None:
    gate, learner, engine_done = Gate(), BusyLearner(), asyncio.Event()
    model = Model("p", "m", Path("m"), LoraConfig())
    arguments: Any = (SilentEngine(), learner, Prompts(), model, 1, 0.1, gate, engine_done)
    async with asyncio.timeout(30), gate.sampling():
        check = asyncio.create_task(canary.check(*arguments))
        await engine_done.wait()
    check.cancel()


async def test_settings_that_the_engine_has_keep_no_request_waiting() -> None:
    workers, engine = Workers(ServerConfig()), Engine()
    started: Any = _Started(engine, None, None)  # type: ignore[arg-type]
    workers._started = started
    settings = {"max_model_len": 512, "compilation_config": {"level": 1}}
    await workers.start("tiny-random", settings)
    async with asyncio.timeout(30), workers.gate.sampling():
        await workers.start("tiny-random", settings)
        await workers.start("tiny-random", {"max_model_len": 512})
    assert engine.configured == [settings]
