"""Every write of a step fails in turn: an answer without an error means that the step is there."""

import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kit.manifest import damage
from tests.unit.test_training import FakeWorkers, Steps
from trainer import checkpoint
from trainer.config import ServerConfig
from trainer.errors import Conflict, StorageError
from trainer.server.admission import Admission
from trainer.server.journal import Journal
from trainer.server.model import Model
from trainer.server.reports import Reports
from trainer.server.routes import art
from trainer.server.wire import ModelWire, TrainRequest
from trainer.step_config import GrpoConfig


def settings(_: int) -> GrpoConfig:
    return GrpoConfig()


CALLS = ("rename", "replace", "unlink", "mkdir", "rmdir", "fsync")


class Disk:
    """Counts the writes under a directory, and refuses those that a test names."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.count = 0
        self.refuses: Callable[[int], bool] = lambda number: False

    def write(self, path: object) -> None:
        # A number is a file that is open already: fsync.
        if not isinstance(path, int) and not str(path).startswith(self.root):
            return
        self.count += 1
        if self.refuses(self.count):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))


@contextmanager
def watched(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        for name in CALLS:
            function = getattr(os, name)

            def call(path: Any, *rest: Any, real: Any = function, **more: Any) -> Any:
                disk.write(path if not more.get("dir_fd") else disk.root)  # as rmtree names it
                return real(path, *rest, **more)

            patch.setattr(os, name, call)
        real_open = io.open

        def open_file(path: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
            if set(mode) & set("wax+") and not isinstance(path, int):
                disk.write(path)
            return real_open(path, mode, *rest, **more)

        patch.setattr(io, "open", open_file)
        yield


class Started(FakeWorkers):
    tokenizer: Any = None


def server(directory: Path) -> Steps:
    steps = Steps(directory)
    steps.workers = Started()
    steps.learner = steps.workers.learner
    steps.admission = Admission(
        steps.workers, steps.ledger, Reports(ServerConfig(state_dir=str(directory)))
    )
    return steps


def body(number: int) -> TrainRequest:
    groups = [{"trajectories": [], "number": number}]
    wire = ModelWire(name="m", project="p", base_model="b")
    return TrainRequest(model=wire, trajectory_groups=groups, digest=str(number))


async def ask(steps: Steps, number: int) -> str:
    """The whole answer to a train request, as the route gives it, or the error."""
    try:
        training = await steps.admission.admit(steps.model, body(number), settings, "b")
        response = await art.stream(training, verbose=False)
        answer = "".join([str(part) async for part in response.body_iterator])
        await training.sync.ended()
        return answer
    except StorageError as error:
        assert error.status == 503 and "Read-only file system" in error.message
        return "error"


def trained_on(model: Model, step: int) -> str:
    assert not damage(model.path(step))
    return (model.path(step) / "adapter_model.safetensors").read_text()


async def count_writes(directory: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    steps, disk = server(directory), Disk(directory)
    assert await ask(steps, 1) != "error"
    with watched(disk, monkeypatch):
        assert await ask(steps, 2) != "error"
    await steps.admission.stop()
    return disk.count


@pytest.mark.parametrize("lasting", [False, True], ids=["one-write", "until-the-answer"])
async def test_a_failed_write_never_makes_an_answer_without_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lasting: bool
) -> None:
    writes = await count_writes(tmp_path / "calm", monkeypatch)
    assert writes > 10
    answers = set()
    for failing in range(1, writes + 1):
        steps, disk = server(tmp_path / str(failing)), Disk(tmp_path / str(failing))
        assert await ask(steps, 1) != "error"
        disk.refuses = range(failing, 10_000 if lasting else failing + 1).__contains__
        with watched(disk, monkeypatch):
            first = await ask(steps, 2)
        answers.add(first)
        if first != "error":
            assert steps.model.step == 2 and "2" in trained_on(steps.model, 2)
        else:
            assert steps.model.step in (1, 2)  # 2 only if all that failed was its sync
        # The disk is writable again. The same body either gets the answer of its step, or a step.
        before = steps.model.step
        again = await ask(steps, 2)
        assert again != "error", failing
        assert steps.model.step in (before, before + 1) and steps.model.step >= 2
        # Another body is never answered with what a failed one left behind.
        assert '"loss": 3.0' in await ask(steps, 3)
        assert "'number': 3" in trained_on(steps.model, steps.model.step)
        assert Journal(steps.model.directory).pending() == []
        await steps.admission.stop()
    assert "error" in answers


async def test_a_checkpoint_that_a_failed_step_left_is_not_the_next_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, disk = server(tmp_path), Disk(tmp_path)

    async def load(model: Model, step: int) -> None:
        disk.refuses = lambda number: True  # the disk turns read-only while the engine loads
        raise StorageError("The LoRA cannot be read: Read-only file system")

    monkeypatch.setattr(steps.workers, "load", load)
    with watched(disk, monkeypatch):
        assert await ask(steps, 1) == "error"
        assert not damage(steps.model.path(1))  # it could not be deleted
        assert await ask(steps, 1) == "error"  # still: the step is refused, not answered
        assert await ask(steps, 2) == "error"
    monkeypatch.undo()
    assert '"loss": 2.0' in await ask(steps, 2)
    assert "'number': 2" in trained_on(steps.model, 1)
    await steps.admission.stop()


async def test_a_server_that_stops_in_mid_step_says_no_success(tmp_path: Path) -> None:
    steps = server(tmp_path)
    training = await steps.admission.admit(steps.model, body(1), settings, "b")
    training.cancel()
    await training.cancelled()
    assert training.done and training.error is not None
    with pytest.raises(Exception, match="stopped before step 1"):
        await training.wait()
    assert Journal(steps.model.directory).pending() != []  # the next server trains it


@pytest.mark.parametrize("fault", ["deleted", "changed", "manifest"])
async def test_no_step_is_trained_once_the_newest_checkpoint_is_gone_or_changed(
    tmp_path: Path, fault: str
) -> None:
    steps = server(tmp_path)
    for number in (1, 2):
        await ask(steps, number)
    path = steps.model.path(2)
    if fault == "deleted":
        path.rename(tmp_path / "elsewhere")
    elif fault == "changed":
        (path / "adapter_model.safetensors").write_text("other")
    else:
        (path / "manifest.json").write_text('{"files": 3}')
    with pytest.raises(Conflict, match="newest checkpoint of `m` was deleted or changed"):
        await steps.admission.admit(steps.model, body(3), settings, "b")
    assert steps.model.step == 2 and not steps.model.path(3).exists()
    if fault == "deleted":
        (tmp_path / "elsewhere").rename(path)
        assert '"loss": 3.0' in await ask(steps, 3)
        assert steps.model.step == 3
    await steps.admission.stop()


def test_the_learner_refuses_another_checkpoint_than_the_one_it_should_train_from(
    tmp_path: Path,
) -> None:
    for step in (0, 1):
        checkpoint.save(tmp_path, step, lambda directory: None, {})
    checkpoint.check_latest(tmp_path, 1)
    with pytest.raises(Exception, match="is of step `1`, not `2`"):
        checkpoint.check_latest(tmp_path, 2)
