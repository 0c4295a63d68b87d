"""A pull from S3 that changes the checkpoints of a model that is served."""

import asyncio
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.contract import fake_aws
from tests.unit.test_failed_writes import body, server
from trainer import checkpoint
from trainer.config import LoraConfig, ServerConfig
from trainer.errors import CheckpointError, Conflict
from trainer.server import s3
from trainer.server.admission import Admission
from trainer.server.backend import Backend
from trainer.server.ledger import Ledger
from trainer.server.model import Model
from trainer.server.models import Models
from trainer.server.reports import Reports
from trainer.server.routes import art
from trainer.server.storage import Storage
from trainer.server.wire import S3Request
from trainer.server.workers import Workers
from trainer.step_config import GrpoConfig


class RecordingWorkers(Workers):
    """Workers whose engine only records the steps that it loads and unloads."""

    def __init__(self) -> None:
        super().__init__(ServerConfig())
        self.calls: list[tuple[str, int]] = []

    async def load(self, model: Model, step: int) -> None:
        self.calls.append(("load", step))

    async def unload(self, model: Model, step: int) -> None:
        self.calls.append(("unload", step))


LORA = LoraConfig()
SHAPE = LORA.model_dump(mode="json", exclude={"seed"})


def write(model: Model, step: int, weights: str, **about: Any) -> None:
    def write_adapter(directory: Path) -> None:
        (directory / "adapter_model.safetensors").write_text(weights)

    about = {"base_model": "base", "lora": SHAPE, **about}
    checkpoint.save(model.checkpoints, step, write_adapter, about)


def pulling(directory: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Model, Model, Storage]:
    """A model that is served, the same one in a bucket, and the storage that pulls it."""
    model = Model("p", "m", directory / "p" / "models" / "m", LORA, prepared=True)
    stored = Model("p", "m", directory / "s3" / "b" / "p" / "models" / "m", LORA)

    async def aws(*arguments: str, verbose: bool = False) -> str:
        fake_aws.main(*arguments)
        return ""

    monkeypatch.setenv("FAKE_S3", str(directory / "s3"))
    monkeypatch.setattr(s3, "aws", aws)
    workers = RecordingWorkers()
    reports = Reports(ServerConfig(state_dir=str(directory)))
    admission = Admission(workers, Ledger(directory / "l.db"), reports)
    return model, stored, Storage(Models(directory), workers, admission)


def request(**more: Any) -> S3Request:
    wire = {"name": "m", "project": "p", "base_model": "base"}
    return S3Request.model_validate({"model": wire, "s3_bucket": "b", **more})


@pytest.mark.parametrize("only_step", [None, 2])
@pytest.mark.parametrize("age", [-60, 60])
async def test_a_pull_replaces_weights_of_the_same_size_that_are_newer_or_older(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only_step: int | None, age: int
) -> None:
    model, stored, storage = pulling(tmp_path, monkeypatch)
    write(model, 2, "here")
    write(stored, 2, "s3  ")
    model.read_steps()
    for path in stored.path(2).iterdir():
        times = path.stat().st_atime, path.stat().st_mtime + age
        os.utime(path, times)
    await storage.pull(model, request(only_step=only_step))
    assert (model.path(2) / "adapter_model.safetensors").read_text() == "s3  "


async def test_a_pull_touches_neither_the_journal_nor_unfinished_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, stored, storage = pulling(tmp_path, monkeypatch)
    write(stored, 1, "s3")
    own = ["journal.jsonl", "checkpoints/.0002-x/part"]
    for one, text in ((model, "here"), (stored, "s3")):
        for name in own:
            (one.directory / name).parent.mkdir(parents=True, exist_ok=True)
            (one.directory / name).write_text(text)
    (stored.directory / "journal-3").write_text("s3")
    await storage.pull(model, request(delete=True))
    assert [(model.directory / name).read_text() for name in own] == ["here", "here"]
    assert model.step == 1 and not (model.directory / "journal-3").exists()


async def test_a_step_that_is_not_whole_in_the_bucket_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, stored, storage = pulling(tmp_path, monkeypatch)
    write(model, 1, "here")
    write(stored, 2, "s3")
    (stored.path(2) / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="Step `2` in `s3://b/p/models/m` is not whole"):
        await storage.pull(model, request(only_step=2))
    assert model.step == 1


@pytest.mark.parametrize("only_step", [None, 2])
@pytest.mark.parametrize("other", [{"base_model": "other"}, {"lora": {**SHAPE, "alpha": 1}}])
async def test_a_checkpoint_of_another_base_model_or_lora_is_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only_step: int | None, other: Any
) -> None:
    model, stored, storage = pulling(tmp_path, monkeypatch)
    write(model, 1, "here")
    model.read_steps()
    write(stored, 2, "s3", **other)
    with pytest.raises(Conflict, match=r"Checkpoint `2` of .* has another base model or LoRA"):
        await storage.pull(model, request(only_step=only_step))
    assert model.step == 1
    model.read_steps()  # as the next server does
    assert model.step == 1


async def test_a_step_that_a_pull_replaces_is_unloaded_before_it_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model("p", "m", tmp_path, LoraConfig(), prepared=True)
    for step in (0, 1, 2):
        write(model, step, "old")
    model.read_steps()

    async def pull(*_: str, **__: Any) -> str:
        for step in (0, 2):
            (model.path(step) / "manifest.json").unlink()
        write(model, 2, "new")
        return ""

    monkeypatch.setattr(s3, "aws", pull)
    workers = RecordingWorkers()
    reports = Reports(ServerConfig(state_dir=str(tmp_path)))
    admission = Admission(workers, Ledger(tmp_path / "l.db"), reports)
    await Storage(Models(tmp_path), workers, admission).pull(model, request())
    assert workers.calls == [("unload", 0), ("unload", 2), ("load", 2)]
    await admission.stop()


async def test_a_step_that_is_requested_during_a_pull_is_trained_from_what_it_brings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = server(tmp_path)
    write(steps.model, 1, "here")
    steps.model.read_steps()
    copying, copied = asyncio.Event(), asyncio.Event()

    async def aws(*_: str, **__: Any) -> str:
        copying.set()
        await copied.wait()
        write(steps.model, 4, "s3")
        return ""

    monkeypatch.setattr(s3, "aws", aws)
    storage = Storage(Models(tmp_path), steps.workers, steps.admission)
    pull = asyncio.create_task(storage.pull(steps.model, request()))
    await copying.wait()
    admission = steps.admission.admit(steps.model, body(1), lambda _: GrpoConfig(), "base")
    admitted = asyncio.create_task(admission)
    await asyncio.sleep(0)  # it has begun
    copied.set()
    await pull
    training = await admitted
    await training.wait()
    assert (training.request.step, steps.model.step) == (5, 5)
    await steps.admission.stop()


async def test_a_model_is_pulled_and_pushed_before_it_is_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, stored, _ = pulling(tmp_path, monkeypatch)
    backend = Backend(ServerConfig(state_dir=str(tmp_path / "state")), openai_port=1)
    app = FastAPI()
    app.include_router(art.routes(backend))
    address = "http://127.0.0.1"
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=address) as client:

        async def post(verb: str) -> int:
            body = request().model_dump(mode="json", by_alias=True)
            return (await client.post(f"/_experimental_{verb}_s3", json=body)).status_code

        assert await post("pull_from") == 200  # a first run has nothing there yet
        model = backend.models.get(request().model)
        assert model.steps == {}
        write(stored, 2, "s3")
        assert (await post("pull_from"), model.step) == (200, 2)
        write(model, 3, "here")
        backend.models.remove(model)
        assert await post("push_to") == 200
        assert checkpoint.list_steps(stored.checkpoints) == [2, 3]
    await backend.stop()
