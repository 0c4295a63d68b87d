"""Several steps of a model are admitted at once: they train, are served and fail in order."""

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_failed_writes import body, trained_on
from tests.unit.test_training import SavingLearner, Steps
from trainer import checkpoint
from trainer.config import ServerConfig
from trainer.errors import Conflict, NotReady, OutOfMemory, TrainerError, UnknownModel
from trainer.server.admission import MOST_UNDER_WAY, Admission
from trainer.server.journal import Journal, JournaledRequest
from trainer.server.models import Models
from trainer.server.reports import Reports
from trainer.server.training import Training
from trainer.server.workers import Workers
from trainer.step_config import GrpoConfig


class Events(defaultdict[str, asyncio.Event]):
    """`train 1` is set when step 1 may train, `load 1` when it may be loaded, and so on."""

    def __init__(self) -> None:
        super().__init__(asyncio.Event)

    def allow(self, *names: str) -> None:
        for name in names:
            self[name].set()


class WaitingLearner(SavingLearner):
    def __init__(self, events: Events) -> None:
        super().__init__()
        self.events = events

    async def train(
        self, checkpoints: Path, request: Path, config: Any, lora: Any, *, parent: int
    ) -> AsyncIterator[dict[str, Any]]:
        self.events.allow(f"trains {parent + 1}")
        await self.events[f"train {parent + 1}"].wait()
        async for row in super().train(checkpoints, request, config, lora, parent=parent):
            yield row


class WaitingWorkers(Workers):
    """Workers that do nothing before a test allows it."""

    tokenizer: Any = None

    def __init__(self, config: ServerConfig) -> None:
        super().__init__(config)
        self.events = Events()
        self.waiting_learner = WaitingLearner(self.events)
        self.cannot_load: set[int] = set()
        self.loaded: list[int] = []
        self.unloaded: list[int] = []
        self.checked: list[int] = []

    @property
    def learner(self) -> WaitingLearner:
        return self.waiting_learner

    async def load(self, model: Any, step: int) -> None:
        self.events.allow(f"loads {step}")
        await self.events[f"load {step}"].wait()
        if step in self.cannot_load:
            raise TrainerError("The engine has no room")
        self.loaded.append(step)

    async def unload(self, model: Any, step: int) -> None:
        self.unloaded.append(step)

    async def check(self, model: Any, step: int, engine_done: asyncio.Event) -> dict[str, float]:
        engine_done.set()
        await self.events[f"check {step}"].wait()
        self.checked.append(step)
        return {"canary/logprob_difference": 0.0}

    async def make_room(self) -> bool:
        self.learner.calls.append("made room")
        return True


class Admitted(Steps):
    """The steps of one model, each of which waits until a test allows it."""

    def __init__(self, directory: Path, *, take_turns: bool = False) -> None:
        super().__init__(directory)
        config = ServerConfig(state_dir=str(directory), take_turns=take_turns)
        self.waiting = WaitingWorkers(config)
        self.allow = self.waiting.events.allow
        self.admission = Admission(self.waiting, self.ledger, Reports(config))

    async def admit(self, number: int) -> Training:
        return await self.admission.admit(self.model, body(number), lambda _: GrpoConfig(), "b")

    async def reached(self, name: str) -> None:
        async with asyncio.timeout(30):
            await self.waiting.events[name].wait()


@pytest.fixture
def steps(tmp_path: Path) -> Admitted:
    return Admitted(tmp_path)


async def test_a_step_trains_while_the_one_before_is_loaded_and_checked(steps: Admitted) -> None:
    first, second = await steps.admit(1), await steps.admit(2)
    assert [first.request.step, second.request.step] == [1, 2]
    assert steps.admission.under_way == ["p/m@1", "p/m@2"]
    steps.allow("train 1", "train 2", "load 2")
    await steps.reached("trains 2")
    assert not first.done and steps.model.step == 0  # its gradients did not wait for the load
    steps.allow("load 1")
    await second.wait()
    assert steps.waiting.loaded == [1, 2] and steps.model.step == 2
    assert first.done and first.rows_so_far == [{"loss": 1.0}]
    assert steps.waiting.checked == []
    steps.allow("check 2", "check 1")
    while len(steps.waiting.checked) < 2:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    lines = (steps.model.directory / "history.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows if "time/step_s" in row] == [1, 2]
    assert sorted(row["step"] for row in rows if "canary/logprob_difference" in row) == [1, 2]
    await steps.admission.stop()


async def test_requests_sample_while_a_step_trains_unless_they_take_turns(tmp_path: Path) -> None:
    for take_turns in (False, True):
        steps = Admitted(tmp_path / str(take_turns), take_turns=take_turns)
        training = await steps.admit(1)
        await steps.reached("trains 1")
        answered = asyncio.Event()

        async def chat(steps: Admitted = steps, answered: asyncio.Event = answered) -> None:
            async with steps.waiting.gate.sampling():
                answered.set()

        chatting = asyncio.create_task(chat())
        for _ in range(10):
            await asyncio.sleep(0)
        assert answered.is_set() is not take_turns
        steps.allow("train 1", "load 1", "check 1")
        await training.wait()
        await chatting
        await steps.admission.stop()


async def test_a_step_that_does_not_fit_beside_the_engine_waits_for_its_requests(
    steps: Admitted,
) -> None:
    steps.waiting.learner.too_large = 2
    steps.allow("train 1", "load 1", "check 1")
    async with steps.waiting.gate.sampling():
        training = await steps.admit(1)
        while steps.waiting.learner.calls != ["tried", "tried"]:
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        assert steps.waiting.learner.calls == ["tried", "tried"]  # the engine is in use
    await training.wait()
    assert steps.waiting.learner.calls == ["tried", "tried", "made room", "tried", "released"]
    assert steps.waiting.takes_turns
    await steps.admission.stop()


async def test_steps_that_were_trained_from_one_that_cannot_be_served_are_removed_with_it(
    steps: Admitted,
) -> None:
    steps.waiting.cannot_load = {1}
    first, second, third = [await steps.admit(number) for number in (1, 2, 3)]
    steps.allow("train 1", "train 2", "load 2", "load 3")
    await steps.reached("trains 3")  # the second has its checkpoint, the third is being trained
    assert checkpoint.list_steps(steps.model.checkpoints) == [1, 2]
    steps.allow("load 1")
    while not first.failed:
        await asyncio.sleep(0)
    fourth = asyncio.create_task(steps.admit(4))
    await asyncio.sleep(0)
    steps.allow("train 3")
    with pytest.raises(TrainerError, match="The engine has no room"):
        await first.wait()
    for training, reason in ((second, "step 1 failed"), (third, "step 2 failed")):
        with pytest.raises(NotReady, match=reason):
            await training.wait()
    steps.waiting.cannot_load.clear()
    again = await fourth
    await again.wait()
    assert again.request.step == steps.model.step == 1
    assert checkpoint.list_steps(steps.model.checkpoints) == [1]
    assert "'number': 4" in trained_on(steps.model, 1)
    steps.model.journal.delivered(1)
    await again.sync.ended()
    assert Journal(steps.model.directory).pending() == []
    await steps.admission.stop()


async def test_a_step_that_cannot_be_trained_takes_those_behind_it_along(steps: Admitted) -> None:
    steps.waiting.learner.too_large = 9
    steps.waiting.make_room = _cannot_make_room  # type: ignore[method-assign]
    first, second = await steps.admit(1), await steps.admit(2)
    steps.allow("train 1")
    with pytest.raises(OutOfMemory):
        await first.wait()
    with pytest.raises(NotReady, match="Step 2 was not trained, because step 1 failed"):
        await second.wait()
    assert steps.model.step == 0 and Journal(steps.model.directory).pending() == []
    await steps.admission.stop()


async def _cannot_make_room() -> bool:
    return False


async def test_each_body_sent_again_gets_its_own_step_and_no_more_than_a_few_wait(
    steps: Admitted,
) -> None:
    admitted = [await steps.admit(number) for number in range(MOST_UNDER_WAY)]
    assert [await steps.admit(number) for number in range(MOST_UNDER_WAY)] == admitted
    with pytest.raises(Conflict, match="`m` has 8 steps under way"):
        await steps.admit(99)
    numbers = range(1, MOST_UNDER_WAY + 1)
    steps.allow(*(f"{what} {step}" for what in ("train", "load", "check") for step in numbers))
    await admitted[-1].wait()
    assert steps.waiting.loaded == list(numbers)
    steps.model.journal.delivered(1)
    assert await steps.admit(1) is admitted[1]
    assert (await steps.admit(0)).request.step == MOST_UNDER_WAY + 1  # delivered: a new request
    await steps.admission.stop()


async def test_a_server_that_stops_keeps_the_requests_of_all_steps(steps: Admitted) -> None:
    admitted = [await steps.admit(number) for number in (1, 2, 3)]
    steps.allow("train 1")
    await steps.reached("loads 1")
    await steps.admission.stop()
    assert [request.step for request in Journal(steps.model.directory).pending()] == [1, 2, 3]
    assert all("stopped before step" in str(training.error) for training in admitted)


def _journaled(steps: Steps, *numbers: int) -> None:
    """Leave requests and checkpoints as a server that was killed."""
    for step in numbers:
        request = JournaledRequest(step, str(step), "b", {}, [{"number": step}], {})
        steps.model.journal.begin(request)

        def write(directory: Path, step: int = step) -> None:
            (directory / "adapter_model.safetensors").write_text(str(step))

        checkpoint.save(steps.model.checkpoints, step, write, {})
    steps.model.read_steps()


def test_a_checkpoint_that_a_power_cut_damaged_is_made_again_with_those_after_it(
    tmp_path: Path,
) -> None:
    steps = Steps(tmp_path)
    _journaled(steps, 1, 2, 3)
    for step in (1, 2):
        steps.model.journal.delivered(step)
    (steps.model.path(2) / "adapter_model.safetensors").write_text("")
    steps.model.read_steps()
    assert steps.model.step == 3
    assert [request.step for request in steps.model.unfinished()] == [2, 3]
    assert steps.model.step == 1 and checkpoint.list_steps(steps.model.checkpoints) == [1]
    assert [request.step for request in Journal(tmp_path).unsynced()] == [2]  # 1 is synced now


def test_no_later_step_is_removed_for_one_whose_checkpoint_was_deleted(tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    _journaled(steps, 1, 2, 3)
    steps.model.journal.synced(2)
    steps.model.journal.delivered(2)
    checkpoint.delete(steps.model.checkpoints, [1])
    steps.model.read_steps()
    assert [request.step for request in steps.model.unfinished()] == [3]
    assert steps.model.step == 3 and [it.step for it in Journal(tmp_path).pending()] == [3]


async def test_answers_of_a_killed_server_do_not_take_the_model_back(steps: Admitted) -> None:
    _journaled(steps, 1, 2)
    found = steps.model.unfinished()
    assert [request.step for request in found] == [1, 2]
    steps.allow("load 2", "check 1", "check 2")
    trainings = [steps.admission.start(steps.model, request) for request in found]
    await trainings[0].wait()
    assert steps.model.step == 2  # not 1
    await trainings[1].wait()
    assert steps.waiting.loaded == [2] and steps.waiting.learner.calls == []
    assert trainings[0].request.groups == []  # a client needs only its rows
    await steps.admission.stop()


async def test_a_step_that_is_not_served_cannot_be_sampled_and_leaves_nothing_in_the_engine(
    steps: Admitted, tmp_path: Path
) -> None:
    models = Models(tmp_path)
    models.serve_pulled(steps.model)
    steps.waiting.cannot_load = {1}
    first = await steps.admit(1)
    steps.allow("train 1")
    await steps.reached("loads 1")
    with pytest.raises(UnknownModel):
        models.find("m@1")
    steps.allow("load 1")
    with pytest.raises(TrainerError, match="no room"):
        await first.wait()
    assert steps.waiting.unloaded == [1]
    await steps.admission.stop()
