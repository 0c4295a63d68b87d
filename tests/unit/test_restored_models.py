"""A server that was killed serves all its models again before it finishes interrupted steps."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kit.state_dir import SERVING
from kit.types import Json
from tests.unit.test_steps_in_order import WaitingWorkers
from trainer import checkpoint
from trainer.config import ServerConfig
from trainer.server.backend import Backend
from trainer.server.journal import Journal, JournaledRequest
from trainer.server.wire import ModelWire
from trainer.step_config import GrpoConfig


class StartedWorkers(WaitingWorkers):
    """Workers that need no start, and a learner that begins models at step 0."""

    def __init__(self, config: ServerConfig) -> None:
        super().__init__(config)
        self.waiting_learner.prepare = self._first_checkpoint  # type: ignore[method-assign]
        self.events.allow("load 0")

    async def start(self, base_model: str, engine_args: Json) -> None: ...

    async def _first_checkpoint(self, checkpoints: Path, lora: Any) -> int:
        def write(directory: Path) -> None:
            (directory / "adapter_model.safetensors").write_text("0")

        if checkpoint.latest(checkpoints) is None:
            checkpoint.save(checkpoints, 0, write, {})
        return checkpoint.latest(checkpoints) or 0


def wire(name: str) -> ModelWire:
    sent = {"name": name, "project": "p", "base_model": "b", "trainable": True}
    return ModelWire.model_validate(sent)


@pytest.fixture
async def killed(tmp_path: Path) -> AsyncIterator[Backend]:
    """A server that had a step of `first` under way, and served `second` too, when it was killed"""
    config = ServerConfig(state_dir=str(tmp_path), base_model="b")
    backend = Backend(config, openai_port=1)
    backend.workers = backend.admission._workers = StartedWorkers(config)
    wires = [wire(name).model_dump(mode="json", by_alias=True) for name in ("first", "second")]
    (tmp_path / SERVING).write_text(json.dumps(wires))
    settings = GrpoConfig().model_dump(mode="json")
    request = JournaledRequest(1, "1", "b", wires[0], [{"number": 1}], settings)
    directory = backend.models.directory(wire("first"))
    directory.mkdir(parents=True)
    Journal(directory).begin(request)
    yield backend
    await backend.admission.stop()


def events(backend: Backend) -> Any:
    workers: Any = backend.workers
    return workers.events


async def until_it_trains(backend: Backend) -> None:
    async with asyncio.timeout(30):
        await events(backend)["trains 1"].wait()


async def test_an_interrupted_step_keeps_no_other_model_unserved(killed: Backend) -> None:
    starting = asyncio.create_task(killed.start())
    await until_it_trains(killed)
    assert killed.health.report() == {"status": "ok"}
    assert [killed.models.find(f"p/{name}")[1] for name in ("first", "second")] == [0, 0]
    async with asyncio.timeout(30):
        await killed.prepare(wire("second"))
    events(killed).allow("train 1", "load 1", "check 1")
    await starting
    assert [killed.models.find(f"p/{name}")[1] for name in ("first", "second")] == [1, 0]


@pytest.mark.parametrize("early", [True, False], ids=["while it starts", "while it trains"])
async def test_a_client_sees_the_step_that_it_sent_before_the_kill(
    killed: Backend, early: bool
) -> None:
    async with killed._starting:  # the client is as early as the server itself
        starting = asyncio.create_task(killed.start())
        preparing = asyncio.create_task(killed.prepare(wire("first"))) if early else None
        await asyncio.sleep(0.05)
    await until_it_trains(killed)
    assert killed.models.find("p/second")[1] == 0
    preparing = preparing or asyncio.create_task(killed.prepare(wire("first")))
    await asyncio.sleep(0.05)
    assert not preparing.done()
    events(killed).allow("train 1", "load 1", "check 1")
    await preparing
    assert killed.models.get(wire("first")).step == 1
    await starting


async def test_an_interrupted_step_that_fails_is_a_fault_of_its_own(killed: Backend) -> None:
    workers: Any = killed.workers
    workers.cannot_load = {1}
    events(killed).allow("train 1", "load 1")
    await killed.start()
    fault = "Step 1 of `p/first` was interrupted, and lost: The engine has no room"
    assert killed.health.report() == {"status": "degraded", "reasons": [fault]}
    assert killed.models.find("p/first")[1] == 0
    await killed.prepare(wire("first"))  # the client sends its request again
