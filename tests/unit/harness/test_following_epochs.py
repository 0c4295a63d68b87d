"""The next epoch is submitted while one trains: nothing is lost by it, or trained twice."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.unit.harness.sampling_ahead import (
    Agent,
    QueueingBackend,
    first_examples,
    metrics,
    settled,
    setup,
    training,
    until,
)
from trainer.harness.epoch import EpochUnderWay, step_after
from trainer.harness.history import Pending
from trainer.harness.types import (
    Example,
    TrainingJobRef,
    TrainingJobStatus,
    Trajectory,
    TrajectoryCollection,
)


async def finish(backend: QueueingBackend, agent: Agent, task: "asyncio.Task[Any]") -> None:
    """Let every step end that is submitted, until the run does."""
    while not task.done():
        await settled(agent)
        if backend.step < len(backend.trained) or backend.step < await backend.newest_step():
            backend.finish()
        await asyncio.sleep(0.01)
    task.result()


def assert_each_trained_once(backends: list[QueueingBackend], steps: int) -> None:
    trained = [step for backend in backends for step in backend.trained]
    names = [name for step in trained for group in step for name in group]
    assert len(trained) == steps and max(Counter(names).values()) == 1


@pytest.mark.parametrize(("max_age", "ahead"), [(1, 4), (2, 6)])
async def test_the_next_step_is_submitted_while_one_trains(
    tmp_path: Path, max_age: int, ahead: int
) -> None:
    backend = QueueingBackend()
    agent = Agent(backend)
    made = setup(tmp_path, backend, agent, epochs=6, max_steps_off_policy=max_age)
    async with training(made) as task:
        await until(lambda: len(backend.trained) == 2)
        assert backend.step == 0 and metrics_if_any(tmp_path) == []
        assert await settled(agent) == ahead, "no further ahead than allowed"
        await finish(backend, agent, task)
    rows = metrics(tmp_path)
    assert [(row["epoch"], row["step"]) for row in rows] == [(n, n) for n in range(1, 7)]
    assert all(row["policy_age/max"] <= max_age for row in rows)
    assert not list(tmp_path.glob("pending_epoch*"))
    assert_each_trained_once([backend], 6)


def metrics_if_any(tmp_path: Path) -> list[Any]:
    return metrics(tmp_path) if (tmp_path / "training_metrics.jsonl").exists() else []


@pytest.mark.parametrize("released", [True, False])
async def test_no_straggler_is_left_out_while_another_step_trains(
    tmp_path: Path, released: bool
) -> None:
    backend = QueueingBackend()
    agent = Agent(backend)
    made = setup(tmp_path, backend, agent, epochs=5, generations=3, max_steps_off_policy=2)
    slow = first_examples(made)[4], 2
    agent.held[slow] = asyncio.Event()
    async with training(made) as task:
        await until(lambda: len(backend.trained) == 2)
        backend.finish()
        await until(lambda: backend.step == 1)
        await settled(agent)
        # Two groups are there for the third step, and the slow one may not be used later.
        assert len(backend.trained) == 2 and not agent.cancelled
        if released:
            agent.held[slow].set()
        else:
            backend.finish()
        await until(lambda: len(backend.trained) >= 3)
        assert slow[0] in backend.examples(3)
        assert agent.cancelled == ([] if released else [slow])
        agent.held[slow].set()
        await finish(backend, agent, task)
    lost = [row["failures"] for row in metrics(tmp_path)]
    assert lost == [{}, {}, {} if released else {"stale": 1}, {}, {}]


async def killed_with_two_steps_under_way(tmp_path: Path) -> QueueingBackend:
    backend = QueueingBackend()
    agent = Agent(backend)
    async with training(setup(tmp_path, backend, agent, epochs=5)):
        await until(lambda: len(backend.trained) == 2)
        await settled(agent)
    return backend


@pytest.mark.parametrize("trained", [0, 1, 2])
async def test_a_run_killed_with_two_steps_under_way_trains_each_of_them_once(
    tmp_path: Path, trained: int
) -> None:
    first = await killed_with_two_steps_under_way(tmp_path)
    second = QueueingBackend(trained)  # it may have trained them after the kill
    again = Agent(second)
    async with training(setup(tmp_path, second, again, epochs=5, resume=True)) as task:
        await finish(second, again, task)
    assert second.trained[: 2 - trained] == first.trained[trained:], "the same bodies"
    first.trained = first.trained[:trained]
    assert_each_trained_once([first, second], 5)
    assert [(row["epoch"], row["step"]) for row in metrics(tmp_path)] == [
        (number, number) for number in range(1, 6)
    ]


async def test_a_run_killed_between_two_epochs_goes_on_with_the_one_under_way(
    tmp_path: Path,
) -> None:
    first = QueueingBackend()
    agent = Agent(first)
    async with training(setup(tmp_path, first, agent, epochs=5)):
        await until(lambda: len(first.trained) == 2)
        first.finish()
        await until(lambda: len(first.trained) == 3)
    second = QueueingBackend(1)
    again = Agent(second)
    async with training(setup(tmp_path, second, again, epochs=5, resume=True)) as task:
        await finish(second, again, task)
    assert second.trained[:2] == first.trained[1:]
    first.trained = first.trained[:1]
    assert_each_trained_once([first, second], 5)
    assert not list(tmp_path.glob("pending_epoch*"))


@pytest.mark.parametrize("reward", [0.0, 1.0])
async def test_an_epoch_whose_file_is_damaged_is_sampled_again_with_the_one_after(
    tmp_path: Path, reward: float
) -> None:
    first = await killed_with_two_steps_under_way(tmp_path)
    (tmp_path / "pending_epoch.json").write_text('{"epoch": 1, "st')
    second = QueueingBackend()
    again = Agent(second, lambda _, generation: reward * generation)
    async with training(setup(tmp_path, second, again, epochs=5, resume=True)) as task:
        await finish(second, again, task)
    assert second.trained[:2] == first.trained[:2], "their groups are in another file too"
    assert_each_trained_once([second], 5 if reward else 2)
    assert [row["epoch"] for row in metrics(tmp_path)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("told", "served", "interrupted", "step"),
    [
        (4, 4, False, 4),
        (4, 5, False, 4),
        (5, 5, False, 5),  # another client trained, too
        (5, 4, False, 4),
        (5, 5, True, 4),
        (None, 5, False, 4),
        (None, None, False, 4),
        (None, 3, False, 3),
    ],
)
def test_the_step_of_an_epoch(
    told: int | None, served: int | None, interrupted: bool, step: int
) -> None:
    groups = TrajectoryCollection(trajectories=[[Trajectory(episode=[], reward=1.0)]], run_id="r")
    epoch = EpochUnderWay(Pending(1, 3, {}, groups, {}), 0.0, 0.0, interrupted)
    assert step_after(epoch, told, served) == step
    epoch.pending.collection = TrajectoryCollection(trajectories=[], run_id="r")
    assert step_after(epoch, None, 4) == 3


async def test_a_step_that_is_served_while_it_is_submitted_again_counts_once(
    tmp_path: Path,
) -> None:
    class CountsTwice(QueueingBackend):
        async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
            done = await super().status(ref)
            self.step += 1  # the next one is served by now, too
            return done.model_copy(update={"metadata": {"step": self.step}})

    first = QueueingBackend()
    async with training(setup(tmp_path, first, Agent(first), epochs=1)):
        await until(lambda: len(first.trained) == 1)
    second = CountsTwice()
    again = Agent(second)
    async with training(setup(tmp_path, second, again, epochs=1, resume=True)) as task:
        await finish(second, again, task)
    assert [(row["epoch"], row["step"]) for row in metrics(tmp_path)] == [(1, 1)]


async def test_after_a_step_that_fails_the_next_one_is_not_recorded(tmp_path: Path) -> None:
    first = QueueingBackend(fail_at=2)
    agent = Agent(first)
    async with training(setup(tmp_path, first, agent, epochs=5)) as task:
        await until(lambda: len(first.trained) == 2)
        first.finish()
        await until(lambda: len(first.trained) == 3)
        first.finish()
        assert [status.status.value for status in await task] == ["completed", "failed"]
    assert [row["epoch"] for row in metrics(tmp_path)] == [1]
    second = QueueingBackend(1)
    again = Agent(second)
    async with training(setup(tmp_path, second, again, epochs=5, resume=True)) as task:
        await finish(second, again, task)
    assert second.trained[:2] == first.trained[1:3], "a body that differs would be another step"
    first.trained = first.trained[:1]
    assert_each_trained_once([first, second], 5)


@pytest.mark.parametrize("decides", ["early_stopping", "validation"])
async def test_nothing_is_submitted_before_what_decides_about_it(
    tmp_path: Path, decides: str
) -> None:
    backend = QueueingBackend()
    agent = Agent(backend)
    early = {"early_stopping": {"metric": "avg_reward", "patience": 9}}
    made = setup(tmp_path, backend, agent, **(early if decides == "early_stopping" else {}))
    if decides == "validation":
        made.validation, made.validation_interval = [Example("v", "q", "a", {})], 1
    async with training(made) as task:
        for step in (1, 2, 3):
            await until(lambda: len(backend.trained) > backend.step)
            await settled(agent)
            assert len(backend.trained) == step
            backend.finish()
            await until(lambda step=step: backend.step == step)
        await asyncio.wait_for(task, 60)


async def test_an_outage_while_a_step_trains_costs_no_epoch(tmp_path: Path) -> None:
    backend = QueueingBackend()
    agent = Agent(backend, lambda name, generation: float(generation))
    made = setup(tmp_path, backend, agent, epochs=4, max_steps_off_policy=2)

    async def workflow(example: Example, llm: Any) -> float:
        await until(lambda: example.id in first_examples(made)[:2] or bool(backend.trained))
        if backend.trained and backend.step == 0:
            raise RuntimeError("no network")
        return await agent(example, llm)

    made.runner._workflow = workflow
    async with training(made) as task:
        await until(lambda: len(backend.trained) == 1)
        await settled(agent)
        assert len(backend.trained) == 1, "there is time until the step ends"
        await finish(backend, agent, task)
    assert [row["filtered_groups"] for row in metrics(tmp_path)] == [2, 2, 2, 2]
