"""Which checkpoints are deleted, and when: none in use, and no client waits for a slow disk."""

import asyncio
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_failed_writes import body
from tests.unit.test_training import Steps
from trainer import checkpoint
from trainer.config import LoraConfig, ServerConfig
from trainer.errors import DiskFull, NotFound
from trainer.server import storage as storage_module
from trainer.server.backend import Backend
from trainer.server.journal import JournaledRequest
from trainer.server.model import Model
from trainer.server.models import Models
from trainer.server.storage import Storage


async def trained(directory: Path, count: int) -> tuple[Steps, Storage]:
    """A model after some steps, whose files are synced."""
    steps = Steps(directory)
    for number in range(1, count + 1):
        training = steps.train(number)
        await training.wait()
        await training.sync.ended()
    return steps, Storage(Models(directory), steps.workers, steps.admission)


def on_disk(steps: Steps) -> list[int]:
    return checkpoint.list_steps(steps.model.checkpoints)


async def test_a_leased_step_is_kept_and_one_that_is_being_deleted_cannot_be_leased(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, storage = await trained(tmp_path, 3)
    storage.lease(steps.model, 1, "lease")
    delete = checkpoint.delete

    def delete_while_another_client_asks(checkpoints: Path, chosen: Iterable[int]) -> None:
        with pytest.raises(NotFound, match="no checkpoint of step `2`"):
            storage.lease(steps.model, 2, "late")
        delete(checkpoints, chosen)

    monkeypatch.setattr(checkpoint, "delete", delete_while_another_client_asks)
    assert await storage.keep(steps.model, []) == [2]
    assert sorted(steps.model.steps) == [1, 3] == on_disk(steps)
    await steps.admission.stop()


async def test_checkpoints_are_deleted_while_the_next_step_trains_but_none_that_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, storage = await trained(tmp_path, 4)
    loads = asyncio.Event()
    monkeypatch.setattr(steps.workers, "load", lambda *_: loads.wait())
    config = {"kl_penalty_coef": 0.1, "kl_ref_adapter_path": str(steps.model.path(2))}
    request = JournaledRequest(5, "5", "b", {}, [{"number": 5}], config)
    steps.model.journal.begin(request)
    following = steps.admission.start(steps.model, request)
    assert await storage.keep(steps.model, []) == [1, 3]
    assert set(on_disk(steps)) - {5} == {2, 4}
    loads.set()
    await following.wait()
    await following.sync.ended()
    assert await storage.keep(steps.model, []) == [2, 4]
    assert on_disk(steps) == [5]
    await steps.admission.stop()


async def test_the_reference_of_a_step_that_is_being_journaled_is_kept(
    tmp_path: Path,
) -> None:
    steps, storage = await trained(tmp_path, 3)
    config = {"kl_ref_adapter_path": str(steps.model.path(1))}
    steps.admission._written["p/m"] = JournaledRequest(4, "4", "b", {}, [], config)
    assert await storage.keep(steps.model, []) == [2]
    await steps.admission.stop()


async def test_files_are_deleted_once_the_newest_step_is_synced_and_the_client_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, storage = await trained(tmp_path, 2)
    synced = threading.Event()
    monkeypatch.setattr(checkpoint, "sync", lambda path: synced.wait())
    monkeypatch.setattr(storage_module, "DELETING_SECONDS", 0)
    third = steps.train(3)
    await third.wait()
    assert await storage.keep(steps.model, []) == [1, 2]
    assert list(steps.model.steps) == [3]
    assert on_disk(steps) == [1, 2, 3]  # a power cut may still damage the newest
    synced.set()
    await asyncio.gather(*storage._background)
    assert on_disk(steps) == [3]
    await steps.admission.stop()


async def test_a_step_that_is_sampled_from_keeps_its_files_and_the_client_does_not_wait(
    tmp_path: Path,
) -> None:
    steps, storage = await trained(tmp_path, 3)
    with steps.model.used(2):
        begun = time.monotonic()
        assert await storage.keep(steps.model, []) == [1, 2]
        assert time.monotonic() - begun < storage_module.DELETING_SECONDS
        await asyncio.sleep(0.2)
        assert on_disk(steps) == [2, 3]
        assert steps.model.served_steps == [3]
    await asyncio.gather(*storage._background)
    assert on_disk(steps) == [3]
    await steps.admission.stop()


async def test_a_deletion_that_waited_leaves_the_files_of_a_new_model_alone(
    tmp_path: Path,
) -> None:
    steps, storage = await trained(tmp_path, 2)
    with steps.model.used(1):
        assert await storage.keep(steps.model, []) == [1]
        storage._models.serve_pulled(Model("p", "m", tmp_path, LoraConfig()))
    await asyncio.gather(*storage._background)
    assert on_disk(steps) == [1, 2]
    await steps.admission.stop()


async def test_steps_that_could_not_be_deleted_are_deleted_by_the_next_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, storage = await trained(tmp_path, 2)

    def refuse(*_: Any) -> None:
        raise DiskFull("Cannot delete the checkpoint", hint="Free disk space")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "delete", refuse)
        with pytest.raises(DiskFull):
            await storage.keep(steps.model, [])
    assert on_disk(steps) == [1, 2]
    assert await storage.keep(steps.model, []) == [1]
    assert on_disk(steps) == [2]
    await steps.admission.stop()


async def test_a_request_that_waits_while_its_model_is_deleted_trains_nothing(
    tmp_path: Path,
) -> None:
    backend = Backend(ServerConfig(state_dir=str(tmp_path)), openai_port=1)
    model = await backend.register(body(1).model)
    assert model
    model.prepared = True
    async with backend.admission.paused(model):  # as while its files are deleted
        waiting = asyncio.create_task(backend.train(body(1)))
        await asyncio.sleep(0)  # it has begun
        backend.models.remove(model)
    with pytest.raises(NotFound, match="is not registered"):
        await waiting
    assert not model.directory.exists()
    await backend.stop()
