"""A step as a transaction: what fails leaves nothing behind, what stands is not lost."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from trainer import checkpoint
from trainer.config import LoraConfig
from trainer.errors import DiskFull, OutOfMemory, TrainerError
from trainer.learner.process import LearnerProcess
from trainer.server.admission import Trainings
from trainer.server.gate import Gate
from trainer.server.journal import Request
from trainer.server.ledger import Ledger
from trainer.server.models import Model
from trainer.server.prometheus import Metrics
from trainer.server.training import Training
from trainer.server.wandb_reports import Reports


class SavingLearner(LearnerProcess):
    """Makes the checkpoints and trains nothing."""

    def __init__(self) -> None:
        self.crowded = False
        self.too_large = 0
        """How many more times the step does not fit."""
        self.did: list[str] = []

    async def release(self) -> None:
        self.did.append("released")

    async def stop(self) -> None:
        self.did.append("ended")

    async def train(
        self, checkpoints: Path, groups: Any, config: Any, lora: Any
    ) -> AsyncIterator[dict[str, Any]]:
        self.did.append("tried")
        if self.too_large:
            self.too_large -= 1
            raise OutOfMemory("The step does not fit the GPU")
        yield {"loss": float(groups[0]["number"])}

        def write(directory: Path) -> None:
            (directory / "adapter_model.safetensors").write_text(str(groups))

        step = (checkpoint.latest(checkpoints) or 0) + 1
        checkpoint.save(checkpoints, step, write, {}, synced=False)
        yield {"checkpoint": "", "step": step}


class Steps:
    """The steps of one model, whose engine may refuse to load or to make room."""

    def __init__(self, directory: Path) -> None:
        self.model = Model("p", "m", directory, LoraConfig(), prepared=True)
        self.learner = SavingLearner()
        self.refuses = 0
        """How many more times nothing is loaded."""
        self.makes_room = True
        reports = Reports(None, directory)
        acts = (self._load, self._check, self._make_room)
        self.trainings = Trainings(Ledger(directory / "l.db"), Gate(), *acts, Metrics(), reports)

    async def _load(self, model: Model, step: int) -> None:
        if self.refuses:
            self.refuses -= 1
            raise TrainerError("The engine has no room")

    async def _check(self, model: Model) -> dict[str, float]:
        return {"canary/logprob_difference": 0.0}

    async def _make_room(self) -> bool:
        self.learner.did.append("made room")
        return self.makes_room

    def train(self, number: int) -> Training:
        request = Request(self.model.step + 1, str(number), "b", {}, [{"number": number}], {})
        self.model.journal.begin(request)
        return self.trainings.start(self.model, request, self.learner)


async def test_a_step_that_cannot_be_served_is_not_taken_for_the_next_one(tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    steps.refuses = 1
    with pytest.raises(TrainerError, match="no room"):
        await steps.train(1).wait()
    assert checkpoint.list_steps(steps.model.checkpoints) == []
    assert steps.model.unfinished() is None
    training = steps.train(2)
    await training.wait()
    assert training.told == [{"loss": 2.0}]
    assert (steps.model.step, list(steps.model.steps)) == (1, [1])
    await steps.trainings.stop()


async def test_a_request_stays_until_it_is_delivered_and_its_checkpoint_synced(
    tmp_path: Path,
) -> None:
    steps = Steps(tmp_path)
    training = steps.train(1)
    await training.wait()
    await training.synced()
    assert steps.model.unfinished() == training.request  # its answer may still be asked for
    steps.model.journal.delivered(1)
    assert steps.model.unfinished() is None
    await steps.trainings.stop()


async def test_a_sync_that_failed_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def sync(path: Path) -> None:
        tries.append(path.name)
        if len(tries) == 1:
            raise DiskFull("The checkpoint `0001` cannot be written", hint="Free disk space")

    monkeypatch.setattr(checkpoint, "sync", sync)
    steps = Steps(tmp_path)
    training = steps.train(1)
    await training.wait()
    with pytest.raises(DiskFull):
        await training.synced()
    steps.model.journal.delivered(1)
    await training.synced()
    assert tries == ["0001", "0001"]
    assert steps.model.journal.unsynced() is None
    await steps.trainings.stop()


async def test_a_step_stands_though_the_history_cannot_be_written(tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    (tmp_path / "history.jsonl").mkdir()
    await steps.train(1).wait()
    assert steps.model.step == 1
    await steps.trainings.stop()


async def test_a_step_that_does_not_fit_is_tried_again_and_then_the_engine_makes_room(
    tmp_path: Path,
) -> None:
    steps = Steps(tmp_path)
    steps.learner.too_large = 1  # and keeps less the second time
    await steps.train(1).wait()
    assert steps.learner.did == ["tried", "tried"]
    steps.learner.did.clear()
    steps.learner.too_large = 2
    await steps.train(2).wait()
    assert steps.learner.did == ["tried", "tried", "made room", "tried", "released"]
    steps.learner.did.clear()
    await steps.train(3).wait()
    assert steps.learner.did == ["made room", "tried", "released"]
    steps.learner.did.clear()
    steps.refuses = 1  # what the learner still holds is too much for the engine
    await steps.train(4).wait()
    assert steps.learner.did == ["made room", "tried", "released", "ended"]
    assert steps.model.step == 4
    steps.learner.did.clear()
    steps.learner.too_large = 3
    with pytest.raises(OutOfMemory):
        await steps.train(5).wait()
    assert steps.learner.did[-2:] == ["tried", "released"]
    assert steps.model.step == 4
    await steps.trainings.stop()


async def test_a_step_that_does_not_fit_fails_where_the_engine_has_no_room_to_give(
    tmp_path: Path,
) -> None:
    steps = Steps(tmp_path)
    steps.makes_room = False
    steps.learner.too_large = 2
    with pytest.raises(OutOfMemory):
        await steps.train(1).wait()
    assert steps.learner.did == ["tried", "tried", "made room"]
    assert steps.model.step == 0 and steps.model.unfinished() is None
    await steps.trainings.stop()
