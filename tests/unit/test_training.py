"""A step is a transaction: a failed step leaves nothing behind, a served step is never lost."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from trainer import checkpoint
from trainer.config import LoraConfig, ServerConfig
from trainer.errors import DiskFull, OutOfMemory, TrainerError
from trainer.learner.process import LearnerProcess
from trainer.server.admission import Admission
from trainer.server.journal import JournaledRequest
from trainer.server.ledger import Entry, Ledger
from trainer.server.model import Model
from trainer.server.models import Models
from trainer.server.reports import Reports
from trainer.server.storage import Storage
from trainer.server.training import Training
from trainer.server.workers import Workers


class SavingLearner(LearnerProcess):
    """Writes checkpoints without training."""

    def __init__(self) -> None:
        self.crowded = False
        self.too_large = 0
        """How many more times a step does not fit."""
        self.calls: list[str] = []

    async def release(self) -> None:
        self.calls.append("released")

    async def stop(self) -> None:
        self.calls.append("stopped")

    async def train(
        self, checkpoints: Path, request: Path, config: Any, lora: Any, *, parent: int
    ) -> AsyncIterator[dict[str, Any]]:
        groups = json.loads(request.read_text())["groups"]
        self.calls.append("tried")
        if self.too_large:
            self.too_large -= 1
            raise OutOfMemory("The step does not fit the GPU")
        yield {"loss": float(groups[0]["number"])}

        def write(directory: Path) -> None:
            (directory / "adapter_model.safetensors").write_text(str(groups))

        checkpoint.save(checkpoints, parent + 1, write, {}, synced=False)
        yield {"checkpoint": "", "step": parent + 1}


class FakeWorkers(Workers):
    """Started workers, whose engine may refuse to load a LoRA or to make room."""

    def __init__(self) -> None:
        super().__init__(ServerConfig())
        self.saving_learner = SavingLearner()
        self.refuses = 0
        """How many more times a load fails."""
        self.makes_room = True

    @property
    def learner(self) -> SavingLearner:
        return self.saving_learner

    async def load(self, model: Model, step: int) -> None:
        if self.refuses:
            self.refuses -= 1
            raise TrainerError("The engine has no room")

    async def check(self, model: Model, step: int, engine_done: asyncio.Event) -> dict[str, float]:
        engine_done.set()
        return {"canary/logprob_difference": 0.0}

    async def make_room(self) -> bool:
        self.learner.calls.append("made room")
        return self.makes_room


class Steps:
    """The steps of one model."""

    def __init__(self, directory: Path) -> None:
        self.model = Model("p", "m", directory, LoraConfig(), prepared=True)
        self.workers = FakeWorkers()
        self.learner = self.workers.learner
        reports = Reports(ServerConfig(state_dir=str(directory)))
        self.ledger = Ledger(directory / "l.db")
        self.admission = Admission(self.workers, self.ledger, reports)

    def train(self, number: int) -> Training:
        groups = [{"number": number}]
        request = JournaledRequest(self.model.step + 1, str(number), "b", {}, groups, {})
        self.model.journal.begin(request)
        return self.admission.start(self.model, request)


async def test_a_step_that_cannot_be_served_does_not_count_as_the_next_one(tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    steps.workers.refuses = 1
    with pytest.raises(TrainerError, match="no room"):
        await steps.train(1).wait()
    assert checkpoint.list_steps(steps.model.checkpoints) == []
    assert steps.model.unfinished() == []
    training = steps.train(2)
    await training.wait()
    assert training.rows_so_far == [{"loss": 2.0}]
    assert (steps.model.step, list(steps.model.steps)) == (1, [1])
    await steps.admission.stop()


async def test_a_request_stays_until_it_is_delivered_and_its_checkpoint_synced(
    tmp_path: Path,
) -> None:
    steps = Steps(tmp_path)
    training = steps.train(1)
    await training.wait()
    await training.sync.ended()
    [request] = steps.model.unfinished()  # a client may still request its answer
    assert (request.step, request.groups) == (1, [{"number": 1}])
    steps.model.journal.delivered(1)
    assert steps.model.unfinished() == []
    await steps.admission.stop()


async def test_a_deleted_model_leaves_nothing_in_the_ledger(tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    for key in (steps.model.key, "p/other"):
        entry = Entry(
            model=key,
            step=40,
            lora_sha256="",
            rollout=None,
            prompt_ids=[1],
            completion_ids=[2],
            logprobs=[-0.5],
            id=key,
        )
        steps.ledger.record(entry, "text")
    await steps.admission.forget(steps.model)
    assert steps.ledger.with_id(steps.model.key) is None
    assert steps.ledger.with_id("p/other") is not None


async def test_a_deleted_model_leaves_no_directory_while_its_last_step_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(tmp_path / "p" / "models" / "n")
    checks = []

    async def check(model: Model, step: int, engine_done: asyncio.Event) -> dict[str, float]:
        engine_done.set()
        checks.append(step)
        await asyncio.sleep(0.2)
        return {"canary/logprob_difference": 0.0}

    monkeypatch.setattr(steps.workers, "check", check)
    await steps.train(1).wait()
    models = Models(tmp_path)
    monkeypatch.setattr(models, "remove", lambda model: None)
    await Storage(models, steps.workers, steps.admission).delete_model(steps.model)
    await asyncio.sleep(0.4)
    assert checks == [1] and not steps.model.directory.exists()


async def test_a_failed_sync_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []

    def sync(path: Path) -> None:
        attempts.append(path.name)
        if len(attempts) == 1:
            raise DiskFull("The checkpoint `0001` cannot be written", hint="Free disk space")

    monkeypatch.setattr(checkpoint, "sync", sync)
    steps = Steps(tmp_path)
    training = steps.train(1)
    await training.wait()
    with pytest.raises(DiskFull):
        await training.sync.ended()
    steps.model.journal.delivered(1)
    await training.sync.ended()
    assert attempts == ["0001", "0001"]
    assert steps.model.journal.unsynced() == []
    await steps.admission.stop()


async def test_a_step_counts_even_if_the_history_cannot_be_written(tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    (tmp_path / "history.jsonl").mkdir()
    await steps.train(1).wait()
    assert steps.model.step == 1
    await steps.admission.stop()


async def test_choices_that_several_trajectories_share_are_counted(tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    shared, own, unknown = (
        {"finish_reason": "stop", "message": {"role": "assistant"}, "choice_id": id}
        for id in ("a", "b", None)
    )
    branches = [[shared, own], [shared, unknown], [shared, unknown]]
    trajectories = [{"messages_and_choices": items} for items in branches]
    groups = [{"number": 1, "trajectories": trajectories}]
    request = JournaledRequest(1, "", "b", {}, groups, {})
    steps.model.journal.begin(request)
    await steps.admission.start(steps.model, request).wait()
    line = json.loads((tmp_path / "history.jsonl").read_text().splitlines()[0])
    assert line["data/shared_choices"] == 2
    await steps.admission.stop()


async def test_a_step_that_does_not_fit_is_retried_and_then_the_engine_makes_room(
    tmp_path: Path,
) -> None:
    steps = Steps(tmp_path)
    steps.learner.too_large = 1  # the learner keeps less the second time
    await steps.train(1).wait()
    assert steps.learner.calls == ["tried", "tried"]
    steps.learner.calls.clear()
    steps.learner.too_large = 2
    await steps.train(2).wait()
    assert steps.learner.calls == ["tried", "tried", "made room", "tried", "released"]
    steps.learner.calls.clear()
    await steps.train(3).wait()
    assert steps.learner.calls == ["made room", "tried", "released"]
    steps.learner.calls.clear()
    steps.workers.refuses = 1  # the learner still holds too much for the engine
    await steps.train(4).wait()
    assert steps.learner.calls == ["made room", "tried", "released", "stopped"]
    assert steps.model.step == 4
    steps.learner.calls.clear()
    steps.learner.too_large = 3
    with pytest.raises(OutOfMemory):
        await steps.train(5).wait()
    assert steps.learner.calls[-2:] == ["tried", "released"]
    assert steps.model.step == 4
    await steps.admission.stop()


async def test_a_step_that_does_not_fit_fails_if_the_engine_cannot_make_room(
    tmp_path: Path,
) -> None:
    steps = Steps(tmp_path)
    steps.workers.makes_room = False
    steps.learner.too_large = 2
    with pytest.raises(OutOfMemory):
        await steps.train(1).wait()
    assert steps.learner.calls == ["tried", "tried", "made room"]
    assert steps.model.step == 0 and steps.model.unfinished() == []
    await steps.admission.stop()
