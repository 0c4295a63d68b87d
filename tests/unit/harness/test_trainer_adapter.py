"""The TrainerAdapter when a job is cancelled, the backend restarts or the schedule has ended."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace

import httpx
import pytest

from trainer.errors import Conflict, NotFound, NotReady, TrainerError
from trainer.harness.components import ArtTrainerAdapterConfig
from trainer.harness.trainer_adapter import ARTTrainerAdapter
from trainer.harness.types import (
    EpisodeItem,
    EpisodeItemRole,
    TrainingStatusEnum,
    Trajectory,
    TrajectoryCollection,
)

BACKEND = {"name": "m", "project": "p", "base_model": "tiny-random", "ip": "127.0.0.1"}
ANSWERS = {
    "/register": b"null",
    "/_prepare_backend_for_training": b'["http://127.0.0.1:9", "key"]',
    "/_get_step": b"0",
}


def test_a_step_past_the_schedule_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def warning(step: int, **training: object) -> str:
        caplog.clear()
        config = {
            "_type": "openpipe_art_trainer_adapter",
            "backend": {**BACKEND, "port": 7999},
            "training": training,
        }
        with caplog.at_level(logging.WARNING):
            adapter = ARTTrainerAdapter(ArtTrainerAdapterConfig.model_validate(config))
            adapter._warn_if_schedule_ended(step)
        return caplog.text

    linear = {"lr_scheduler_type": "linear", "max_steps": 25}
    assert "Step 26 trains with a learning rate of 0" in warning(25, **linear)
    assert not warning(24, **linear)
    assert not warning(25, max_steps=25) and not warning(25)


async def test_close_cancels_a_running_job_before_it_disconnects() -> None:
    requests: list[str] = []
    training, disconnected = asyncio.Event(), asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer as a backend whose steps never end."""
        while head := (await reader.readuntil(b"\r\n\r\n")).decode():
            (length,) = re.findall(r"content-length: (\d+)", head.lower())
            await reader.readexactly(int(length))
            requests.append(head.split()[1])
            if requests[-1] == "/_train_model":
                training.set()
                await reader.read()
                writer.close()
                return disconnected.set()
            body = ANSWERS[requests[-1]]
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))

    server = await asyncio.start_server(answer, "127.0.0.1")
    port = server.sockets[0].getsockname()[1]
    config = {"_type": "openpipe_art_trainer_adapter", "backend": {**BACKEND, "port": port}}
    adapter = ARTTrainerAdapter(ArtTrainerAdapterConfig.model_validate(config))
    await adapter.initialize()
    item = EpisodeItem(role=EpisodeItemRole.USER, content="q", metadata={})
    group = [Trajectory(episode=[item], reward=1.0, metadata={"recorded": True})]
    ref = await adapter.submit(TrajectoryCollection(trajectories=[group], run_id="r"))
    await training.wait()
    await adapter.close()
    await disconnected.wait()
    server.close()
    assert (await adapter.status(ref)).status == TrainingStatusEnum.CANCELED
    assert requests[-1] == "/_train_model"


@pytest.mark.parametrize("refusal", [NotFound("not registered"), NotReady("not there yet")])
async def test_a_restarted_backend_gets_the_model_registered_again(refusal: TrainerError) -> None:
    calls: list[str] = []

    class Restarted:
        async def _get_step(self, model: object) -> int:
            calls.append("step")
            if len(calls) == 1:
                raise refusal
            return 3

        async def register(self, model: object) -> None:
            calls.append("register")

        async def _prepare_backend_for_training(self, model: object, config: object) -> None:
            calls.append("prepare")

    config = {"_type": "openpipe_art_trainer_adapter", "backend": {**BACKEND, "port": 7999}}
    adapter = ARTTrainerAdapter(ArtTrainerAdapterConfig.model_validate(config))
    adapter._client = Restarted()  # type: ignore[assignment]
    assert await adapter.current_step() == 3
    assert calls == ["step", "register", "prepare", "step"]


class Prepared:
    """A backend that knows every model."""

    async def register(self, model: object) -> None: ...

    async def _prepare_backend_for_training(self, model: object, config: object) -> None: ...


async def test_a_finished_step_is_not_sent_again_if_only_its_answer_was_lost() -> None:
    sent: list[int] = []

    class Interrupted(Prepared):
        async def _train_model(self, *_: object, **__: object) -> AsyncIterator[dict[str, float]]:
            sent.append(1)
            yield {"num_gradient_steps": 4}
            raise TrainerError("cut off") from httpx.ReadError("cut off")

        async def _get_step(self, model: object) -> int:
            return 3

    config = {"_type": "openpipe_art_trainer_adapter", "backend": {**BACKEND, "port": 7999}}
    adapter = ARTTrainerAdapter(ArtTrainerAdapterConfig.model_validate(config))
    adapter._client = Interrupted()  # type: ignore[assignment]
    await adapter._train(3, [], [], None)
    assert sent == [1]


async def test_a_step_that_an_earlier_program_submitted_is_joined_while_it_trains() -> None:
    sent: list[str] = []

    class Training(Prepared):
        async def _get_step(self, model: object) -> int:
            return 3

        async def _delete_checkpoint_files(self, model: object, steps: list[int]) -> None:
            sent.append(f"keep {steps}")
            raise Conflict("Model `m` is training")

        async def _train_model(self, *_: object, **__: object) -> AsyncIterator[dict[str, float]]:
            sent.append("train")
            yield {"num_gradient_steps": 1}

    backend = {**BACKEND, "port": 7999, "delete_old_checkpoints": True}
    config = {"_type": "openpipe_art_trainer_adapter", "backend": backend}
    adapter = ARTTrainerAdapter(ArtTrainerAdapterConfig.model_validate(config))
    adapter._client = Training()  # type: ignore[assignment]
    adapter._builder = SimpleNamespace(pinned_steps={1, 2})
    ref = await adapter.submit(TrajectoryCollection(trajectories=[], run_id="r"))
    done = await adapter.wait_until_complete(ref)
    assert done.status == TrainingStatusEnum.COMPLETED and sent == ["keep [1, 2, 3]", "train"]


class Queue(Prepared):
    """A backend whose steps end when the test says so; it refuses a step that comes too early."""

    def __init__(self) -> None:
        self.sent: list[int | None] = []
        self.refused = 0
        self.step = 3
        self.ends: dict[int, asyncio.Future[None]] = {}

    async def _get_step(self, model: object) -> int:
        return self.step

    async def _train_model(
        self, *_: object, parent_step: int | None = None
    ) -> AsyncIterator[dict[str, float]]:
        self.sent.append(parent_step)
        if self.refused and parent_step is not None:
            self.refused -= 1
            raise Conflict("Another step is the newest")
        end = self.ends[parent_step or 3] = asyncio.get_running_loop().create_future()
        await end
        yield {"num_gradient_steps": 1}


def queueing() -> tuple[ARTTrainerAdapter, Queue]:
    config = {"_type": "openpipe_art_trainer_adapter", "backend": {**BACKEND, "port": 7999}}
    adapter, queue = ARTTrainerAdapter(ArtTrainerAdapterConfig.model_validate(config)), Queue()
    adapter._client = queue  # type: ignore[assignment]
    return adapter, queue


NOTHING = TrajectoryCollection(trajectories=[], run_id="r")


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not happened():
            await asyncio.sleep(0.01)


async def test_a_job_submitted_while_one_trains_is_trained_from_its_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.harness.trainer_adapter.AGAIN_S", 0.01)
    adapter, queue = queueing()
    first = await adapter.submit(NOTHING)
    await until(lambda: bool(queue.ends))
    assert await adapter.newest_step() == 4
    queue.refused = 2
    second = await adapter.submit(NOTHING)
    await until(lambda: len(queue.ends) == 2)
    assert queue.sent == [None, 4, 4, 4], "sent again, until the one before has arrived"
    queue.ends[3].set_result(None)
    queue.ends[4].set_result(None)
    for ref, step in ((first, 4), (second, 5)):
        done = await adapter.wait_until_complete(ref)
        assert done.status == TrainingStatusEnum.COMPLETED
        assert done.metadata and done.metadata["step"] == step


async def test_a_step_of_another_client_comes_between_two_jobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.harness.trainer_adapter.AGAIN_S", 0.01)
    adapter, queue = queueing()
    await adapter.submit(NOTHING)
    await until(lambda: bool(queue.ends))
    queue.refused = 10**6
    await adapter.submit(NOTHING)
    await until(lambda: len(queue.sent) > 3)
    queue.ends.pop(3).set_result(None)
    await until(lambda: bool(queue.ends))
    assert queue.sent[-1] is None, "then it is trained from that client's step"
    await adapter._jobs[5].cancel()


async def test_no_job_takes_the_place_of_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.harness.trainer_adapter.AGAIN_S", 0.01)
    adapter, queue = queueing()
    first = await adapter.submit(NOTHING)
    await until(lambda: bool(queue.ends))
    queue.refused = 10**6
    second = await adapter.submit(NOTHING)
    await until(lambda: len(queue.sent) > 2)
    queue.ends[3].set_exception(TrainerError("out of memory"))
    failed = await adapter.wait_until_complete(second)
    assert failed.status == TrainingStatusEnum.FAILED
    assert failed.message == "Step 5 was not trained, because step 4 failed: out of memory"
    sent = len(queue.sent)
    with pytest.raises(TrainerError, match="Step 5 was not trained, because step 4 failed"):
        await adapter.submit(NOTHING)
    assert len(queue.sent) == sent and await adapter.newest_step() == 4
    assert (await adapter.wait_until_complete(first)).status == TrainingStatusEnum.FAILED
    queue.refused = 0
    await adapter.submit(NOTHING)  # whoever knows of the failure may try again
    await until(lambda: queue.sent[sent:] == [None])
    await adapter._jobs[4].cancel()


async def test_steps_that_the_backend_has_lost_are_not_counted_on() -> None:
    adapter, queue = queueing()
    first = await adapter.submit(NOTHING)
    await until(lambda: bool(queue.ends))
    queue.step = 4
    queue.ends[3].set_result(None)
    await adapter.wait_until_complete(first)
    queue.step = 2  # it returned from an older checkpoint
    assert await adapter.newest_step() == 2


@pytest.mark.parametrize("journaled", [True, False])
async def test_a_job_that_failed_with_the_one_before_goes_on_if_that_is_trained(
    journaled: bool,
) -> None:
    adapter, queue = queueing()
    await adapter.submit(NOTHING)
    await until(lambda: bool(queue.ends))
    second = await adapter.submit(NOTHING)
    await until(lambda: len(queue.ends) == 2)
    queue.ends[4].set_exception(TrainerError("Internal Server Error"))  # the server stops
    await asyncio.sleep(0.01)
    queue.step = 5 if journaled else 4
    queue.ends[3].set_result(None)  # the job before was sent again meanwhile
    if not journaled:
        await until(lambda: len(queue.sent) == 3)
        queue.ends[3].set_result(None)
    done = await adapter.wait_until_complete(second)
    assert done.status == TrainingStatusEnum.COMPLETED
    assert queue.sent == ([None, 4] if journaled else [None, 4, None])


@pytest.mark.parametrize("ends", ["cancelled", "failed"])
async def test_after_a_job_that_the_caller_saw_end_another_takes_its_place(ends: str) -> None:
    adapter, queue = queueing()
    first = await adapter.submit(NOTHING)
    await until(lambda: bool(queue.ends))
    if ends == "cancelled":
        await adapter.cancel(first)
    else:
        queue.ends[3].set_exception(TrainerError("out of memory"))
        await asyncio.wait([adapter._jobs[4].task])
        assert (await adapter.status(first)).status == TrainingStatusEnum.FAILED
    queue.step = 4  # the backend has trained it after all
    second = await adapter.submit(NOTHING)
    await until(lambda: len(queue.sent) == 2)
    assert (second.metadata or {})["step"] == 5
    await adapter.cancel(second)
