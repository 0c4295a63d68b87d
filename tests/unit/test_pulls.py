"""A pull from S3 that changes the checkpoints of a model that is served."""

from pathlib import Path
from typing import Any

import pytest

from trainer import checkpoint
from trainer.config import LoraConfig, ServerConfig
from trainer.server import s3
from trainer.server.admission import Admission
from trainer.server.ledger import Ledger
from trainer.server.model import Model
from trainer.server.models import Models
from trainer.server.reports import Reports
from trainer.server.storage import Storage
from trainer.server.wire import S3Request
from trainer.server.workers import Workers


class RecordingWorkers(Workers):
    """Workers whose engine only records the steps that it loads and unloads."""

    def __init__(self) -> None:
        super().__init__(ServerConfig())
        self.calls: list[tuple[str, int]] = []

    async def load(self, model: Model, step: int) -> None:
        self.calls.append(("load", step))

    async def unload(self, model: Model, step: int) -> None:
        self.calls.append(("unload", step))


def write(model: Model, step: int, weights: str) -> None:
    def write_adapter(directory: Path) -> None:
        (directory / "adapter_model.safetensors").write_text(weights)

    checkpoint.save(model.checkpoints, step, write_adapter, {})


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
    request = S3Request.model_validate({"model": {"name": "m", "project": "p"}, "s3_bucket": "b"})
    await Storage(Models(tmp_path), workers, admission).pull(model, request)
    assert workers.calls == [("unload", 0), ("unload", 2), ("load", 2)]
    await admission.stop()
