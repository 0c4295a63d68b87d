"""Sampling ahead: when a step begins, on which groups, and how far ahead."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kit.errors import ConfigError
from tests.unit.harness.sampling_ahead import (
    PATIENCE,
    Agent,
    Backend,
    first_examples,
    metrics,
    settled,
    setup,
    train,
    training,
    until,
)
from tests.unit.harness.test_trainer import read
from trainer.errors import LlmUnavailable, NothingToTrainOn, RunFailed
from trainer.harness.episodes import wire_groups
from trainer.harness.off_policy_rules import Limits, straggling_from
from trainer.harness.types import (
    Example,
    TrainingJobRef,
    TrainingJobStatus,
    TrajectoryCollection,
    WorkflowRun,
)


async def test_a_blocked_run_does_not_delay_the_step_and_is_trained_in_the_next(
    tmp_path: Path,
) -> None:
    backend = Backend(quick=False)
    agent = Agent(backend)
    made = setup(tmp_path, backend, agent)
    slow = first_examples(made)[0]
    agent.held[slow, 1] = asyncio.Event()
    async with training(made) as task:
        await until(lambda: len(backend.trained) == 1)
        assert slow not in backend.examples(1)
        agent.held[slow, 1].set()
        await settled(agent)
        for _ in range(3):
            backend.finish()
        await asyncio.wait_for(task, PATIENCE)
    assert slow in backend.examples(2)
    rows = metrics(tmp_path)
    assert [(row["epoch"], row["step"]) for row in rows] == [(1, 1), (2, 2), (3, 3)]
    assert [row["policy_age/max"] for row in rows[:2]] == [0, 1]
    assert all(row["failures"] == {} and row["filtered_groups"] == 2 for row in rows)


async def test_a_run_that_ends_too_late_is_lost_as_stale(tmp_path: Path) -> None:
    backend = Backend()
    agent = Agent(backend)
    made = setup(tmp_path, backend, agent, epochs=4)
    slow = first_examples(made)[0]
    agent.held[slow, 1] = asyncio.Event()
    done = backend.status

    async def status(ref: TrainingJobRef) -> TrainingJobStatus:
        found = await done(ref)
        if backend.step == 2:
            agent.held[slow, 1].set()
            await settled(agent)
        return found

    backend.status = status  # type: ignore[method-assign]
    await train(made)
    assert all(slow not in backend.examples(step) for step in (1, 2, 3, 4))
    rows = metrics(tmp_path)
    assert [row["failures"] for row in rows] == [{}, {}, {"stale": 2}, {}]
    assert (
        rows[2]["commonest_failure"] == "2 steps were trained since its oldest choice was sampled"
    )
    records = (tmp_path / "runs/epoch_0003.jsonl").read_text().splitlines()
    stale = [row for row in map(json.loads, records) if row["failure"] == "stale"]
    assert [(row["id"], row["generation"]) for row in stale] == [(slow, 0), (slow, 1)]
    assert [(run.example_id, run.reason) for run in backend.lost] == []


async def test_a_group_is_trained_without_its_straggler_before_it_goes_stale(
    tmp_path: Path,
) -> None:
    backend = Backend()
    agent = Agent(backend)
    made = setup(tmp_path, backend, agent, generations=3, epochs=3)
    slow = first_examples(made)[0]
    agent.held[slow, 2] = asyncio.Event()
    await train(made)
    (group,) = [group for step in backend.trained for group in step if f"-{slow}-" in group[0]]
    assert [name.rpartition("-")[2] for name in group] == ["0", "1"] and group in backend.trained[1]
    assert [row["failures"] for row in metrics(tmp_path)] == [{}, {"stale": 1}, {}]
    assert agent.cancelled == [(slow, 2)]


@pytest.mark.parametrize("steps", [1, 2, 3])
async def test_sampling_is_never_further_ahead_than_the_limit(tmp_path: Path, steps: int) -> None:
    backend = Backend(quick=False)
    agent = Agent(backend)
    made = setup(tmp_path, backend, agent, max_steps_off_policy=steps, epochs=9)
    async with training(made) as task:
        for trained in range(1, 10):
            await until(lambda: len(backend.trained) == trained)  # noqa: B023
            ahead = min(steps, 9 - trained)  # and none for steps that will not be trained
            assert await settled(agent) == 2 * (trained + ahead)
            backend.finish()
        await asyncio.wait_for(task, PATIENCE)
    ages = [row["policy_age/max"] for row in metrics(tmp_path)]
    assert ages == [min(step, steps) for step in range(9)]


async def test_only_groups_that_find_a_free_slot_are_started(tmp_path: Path) -> None:
    backend = Backend()
    agent = Agent(backend)
    made = setup(tmp_path, backend, agent, concurrency=3, groups_per_step=10)
    for name in first_examples(made)[:2]:
        agent.held |= {(name, 0): asyncio.Event(), (name, 1): asyncio.Event()}
    async with training(made):
        await until(lambda: len(agent.runs) == 3)
        assert await settled(agent) == 2


@pytest.mark.parametrize(
    ("ended", "age"),
    [([], None), ([1.0], None), ([1.0, 3.0], 4.0), ([9.0, 1.0, 3.0], 6.0), ([0.1, 0.1], 1.1)],
    ids=["none ended", "less than half", "half", "most", "too short"],
)
def test_runs_are_stragglers_from_twice_the_median_of_the_others(
    ended: list[float], age: float | None
) -> None:
    assert straggling_from(4, ended) == age


@pytest.mark.parametrize(
    ("steps", "waits", "live", "idle", "lagging", "starts"),
    [
        (2, True, 7, 0, [], True),
        (2, True, 8, 0, [], False),
        (2, True, 8, 0, [0.5, 0.4], False),  # not a whole group's worth of ended runs
        (2, True, 8, 0, [0.5, 0.5], True),
        (2, True, 9, 0, [0.9, 1.0], False),
        (2, True, 9, 0, [0.5] * 4, True),
        (2, True, 12, 0, [1.0] * 8, False),  # at most `oversample` times the groups of two steps
        (2, True, 9, 3, [1.0] * 8, False),
        (1, True, 4, 0, [0.5], True),  # the last step: nothing else could use its group
        (1, True, 5, 0, [0.5], False),
        (1, True, 6, 0, [0.5] * 4, False),
        (1, False, 4, 0, [1.0] * 3, False),  # a step trains
        (1, False, 3, 0, [], True),
        (8, False, 32, 0, [0.75] * 4, False),
    ],
)
def test_a_group_that_waits_for_stragglers_makes_room_for_another(
    steps: int, waits: bool, live: int, idle: int, lagging: list[float], starts: bool
) -> None:
    limits = Limits(max_age=1, groups=4, oversample=1.5)
    found = limits.may_start(steps, waits=waits, live=live, idle=idle, lagging=lagging)
    assert found is starts


@pytest.mark.parametrize(
    ("epochs", "max_age", "blocked"),
    [(1, 1, [0, 1]), (4, 1, [6, 7]), (3, 3, [0, 2])],
    ids=["only step", "last step", "as many steps ahead as there are"],
)
async def test_no_straggler_holds_up_the_last_steps(
    tmp_path: Path, epochs: int, max_age: int, blocked: list[int]
) -> None:
    backend = Backend()
    agent = Agent(backend)
    made = setup(
        tmp_path, backend, agent, epochs=epochs, max_steps_off_policy=max_age, oversample=2.0
    )
    now = 0.0
    builder: Any = made.trajectory_builder
    builder.clock = lambda: now
    for place in blocked:
        agent.held[first_examples(made)[place], 1] = asyncio.Event()
    async with training(made) as task:
        await until(lambda: bool(builder._run_id))
        while not task.done():
            await asyncio.sleep(0.01)
            now += 10.0
            builder._more_may_start()  # its timer runs by the real clock
    assert len(backend.trained) == epochs
    assert all(row["failures"].keys() <= {"stale"} for row in metrics(tmp_path)), "none timed out"


async def test_stragglers_do_not_keep_the_engine_from_other_groups(tmp_path: Path) -> None:
    backend = Backend()
    agent = Agent(backend)
    made = setup(tmp_path, backend, agent, generations=4)
    now = 0.0
    builder: Any = made.trajectory_builder
    builder.clock = lambda: now
    for name in first_examples(made):
        agent.held |= {(name, place): asyncio.Event() for place in range(4)}

    def end(*places: int) -> None:
        for name in first_examples(made)[:4]:
            for place in places:
                agent.held[name, place].set()

    async with training(made):
        await until(lambda: len(agent.runs) == 16)
        now = 10.0
        end(0)
        assert await settled(agent) == 4, "most runs of the two steps' groups are under way"
        now = 12.0
        end(1)
        assert await settled(agent) == 4, "half of the runs ended, at a median of 11 s"
        now = 22.0
        builder._more_may_start()  # its timer runs by the real clock
        assert await settled(agent) == 6, "four groups wait for two stragglers each"
        end(2)
        assert await settled(agent) == 6, "no more than `oversample` allows"
        assert backend.trained == []


async def test_groups_with_equal_rewards_are_replaced_by_fresh_examples(tmp_path: Path) -> None:
    backend = Backend()
    made = setup(tmp_path, backend, Agent(backend), epochs=1, groups_per_step=4)
    order = first_examples(made)
    made.runner._workflow = Agent(backend, lambda name, one: one * (name not in order[:2]))
    await train(made)
    assert backend.examples(1) == set(order[:6])  # the backend drops the first two, and counts them
    (row,) = metrics(tmp_path)
    assert (row["num_groups"], row["filtered_groups"]) == (6, 4)


async def test_oversampling_is_bounded(tmp_path: Path) -> None:
    backend = Backend()
    made = setup(tmp_path, backend, Agent(backend), epochs=1, groups_per_step=4, oversample=1.25)
    order = first_examples(made)
    agent = Agent(backend, lambda name, one: one * (name not in order[:3]))
    made.runner._workflow = agent
    await train(made)
    (row,) = metrics(tmp_path)
    assert (row["num_groups"], row["filtered_groups"]) == (5, 2) and agent.groups == 5


async def test_nothing_to_train_on_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    backend = Backend()
    agent = Agent(backend, lambda *_: 1.0)
    made = setup(tmp_path, backend, agent, epochs=9)
    with pytest.raises(NothingToTrainOn, match="in 3 epochs: 3 groups: equal_rewards"):
        await train(made)
    assert backend.trained == []
    assert agent.groups <= 12  # three for each epoch, and three ahead


@pytest.mark.parametrize("lost", [1, 2], ids=["one run of each", "all runs"])
async def test_groups_that_were_lost_while_a_step_trained_do_not_count_for_the_next(
    tmp_path: Path, lost: int
) -> None:
    backend = Backend(quick=False)
    agent = Agent(backend)
    made = setup(tmp_path, backend, agent, epochs=4)
    order = first_examples(made)

    async def workflow(example: Example, llm: Any) -> float:
        if example.id not in order[:2]:
            await until(lambda: bool(backend.trained))
        away = bool(backend.trained) and backend.step == 0  # during the first step
        if away and int(llm._rollout.id.rpartition("-")[2]) < lost:
            raise LlmUnavailable("Cannot reach LLM")
        return await agent(example, llm)

    made.runner._workflow = workflow
    builder: Any = made.trajectory_builder
    async with training(made) as task:
        await until(lambda: bool(backend.trained) and len(builder._complete) == 3)
        for _ in range(4):
            backend.finish()
        await asyncio.wait_for(task, PATIENCE)
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["filtered_groups"] for row in rows] == [2, 2, 2, 2]
    assert [row["failures"] for row in rows] == [{}, {"workflow_failed": 3 * lost}, {}, {}]


async def test_a_workflow_that_always_fails_ends_the_run(tmp_path: Path) -> None:
    backend = Backend()
    made = setup(tmp_path, backend, Agent(backend), epochs=9)
    runs = 0

    async def workflow(example: Example, llm: Any) -> float:
        nonlocal runs
        runs += 1
        raise LlmUnavailable("Cannot reach LLM")

    made.runner._workflow = workflow
    with pytest.raises(NothingToTrainOn, match=r"in 3 epochs: \d+ runs: workflow_failed"):
        await train(made)
    assert runs <= 3 * 2 * 6  # `oversample` times the groups of two steps, in each epoch


@pytest.mark.parametrize("trained", [1, 5], ids=["young enough", "too old"])
async def test_steps_of_another_client_age_the_groups_that_are_waited_with(
    tmp_path: Path, trained: int
) -> None:
    backend = Backend()
    agent = Agent(backend)
    made = setup(tmp_path, backend, agent, epochs=1, max_steps_off_policy=2, groups_per_step=3)
    order = first_examples(made)
    agent.held[order[2], 0] = asyncio.Event()
    async with training(made) as task:
        await settled(agent)
        backend.step += trained
        agent.held[order[2], 0].set()
        await asyncio.wait_for(task, PATIENCE)
    (row,) = metrics(tmp_path)
    old = trained > 2
    assert (row["step"], row["filtered_groups"]) == (trained + 1, 3)
    assert row["policy_age/max"] == (0 if old else trained)
    assert row["failures"] == ({"stale": 6} if old else {})
    assert backend.examples(1) == set(order[3:6] if old else order[:3])


async def test_groups_of_the_same_example_are_told_apart(tmp_path: Path) -> None:
    backend = Backend()
    made = setup(
        tmp_path, backend, Agent(backend), epochs=1, examples=2, generations=3, groups_per_step=4
    )
    sent: list[Any] = []
    submit = backend.submit

    async def submit_and_keep(collection: TrajectoryCollection) -> TrainingJobRef:
        sent.extend(wire_groups(collection))
        return await submit(collection)

    async def workflow(example: Example, llm: Any) -> float:
        if "-group-3-" in llm._rollout.id and llm._rollout.id.endswith("-2"):
            raise ValueError("no tool")
        return await agent(example, llm)

    backend.submit = submit_and_keep  # type: ignore[method-assign]
    agent = Agent(backend)
    made.runner._workflow = workflow
    await train(made)
    assert [len(group["trajectories"]) for group in sent] == [3, 3, 3, 2]
    assert [len(group["exceptions"]) for group in sent] == [0, 0, 0, 1]
    names = [[one["metadata"]["group"] for one in group["trajectories"]] for group in sent]
    assert names == [[0] * 3, [1] * 3, [2] * 3, [3] * 2]
    records = (tmp_path / "runs/epoch_0001.jsonl").read_text().splitlines()
    rows = [json.loads(record) for record in records]
    assert len({(row["id"], row["group"], row["generation"]) for row in rows}) == len(rows) == 12


async def test_the_curriculum_chooses_among_the_groups_of_a_step(tmp_path: Path) -> None:
    backend = Backend()
    curriculum = {"enabled": True, "initial_percentile": 0.5, "expansion_interval": 1}
    made = setup(
        tmp_path, backend, Agent(backend), epochs=2, groups_per_step=4,
        curriculum_learning=curriculum,
    )  # fmt: skip
    order = first_examples(made)
    rewards = {name: float(place) for place, name in enumerate(order)}
    rewards[order[0]] = 0.05  # less than `min_reward_diff`
    made.runner._workflow = Agent(backend, lambda name, one: rewards[name] * one)
    await train(made)
    assert backend.examples(1) == set(order[3:5])  # the easier half of four with a signal
    assert len(backend.trained[1]) == 3
    assert read(tmp_path, "curriculum_state.json")["current_percentile"] == 0.7


async def test_validation_keeps_its_schedule_and_measures_one_step(tmp_path: Path) -> None:
    backend = Backend()
    agent = Agent(backend)
    made = setup(tmp_path, backend, agent, epochs=5)
    made.validation = [Example(f"v{number}", "q", "a", {}) for number in range(3)]
    made.validation_interval = 2
    await train(made)
    found = read(tmp_path, "validation_history.json")
    assert [(row["epoch"], row["num_examples"]) for row in found] == [
        (0, 3), (2, 3), (4, 3), (5, 3)
    ]  # fmt: skip
    assert all("-v" not in name for step in backend.trained for group in step for name in group)


async def test_a_failure_stops_the_run_if_the_config_says_so(tmp_path: Path) -> None:
    def reward(name: str, generation: int) -> float:
        raise ValueError("no tool")

    backend = Backend()
    made = setup(tmp_path, backend, Agent(backend, reward))
    made.runner._stop_on_failure = True
    with pytest.raises(RunFailed, match="no tool"):
        await train(made)


@pytest.mark.parametrize("setting", ["current_step", "model_at"])
async def test_an_adapter_that_does_not_say_its_step_is_refused(
    tmp_path: Path, setting: str
) -> None:
    class Adapter:
        async def initialize(self, config: Any) -> None: ...

    backend = Backend()
    made = setup(tmp_path, backend, Agent(backend), pin_runs=setting == "model_at")
    adapter: Any = Adapter()
    if setting == "model_at":
        adapter.current_step = backend.current_step
    made.trainer_adapter = adapter
    with pytest.raises(ConfigError, match=f"needs a trainer adapter with `{setting}`"):
        await train(made)


async def test_a_group_that_is_being_scored_is_waited_for_before_it_goes_stale(
    tmp_path: Path,
) -> None:
    backend = Backend()
    agent = Agent(backend)
    made = setup(tmp_path, backend, agent)
    slow, score, judged = first_examples(made)[0], made.runner.score, asyncio.Event()

    async def judge(runs: Sequence[WorkflowRun]) -> None:
        if runs[0].example.id == slow:
            await judged.wait()
        await score(runs)

    made.runner.score = judge  # type: ignore[method-assign]
    async with training(made) as task:
        await until(lambda: len(backend.trained) == 1)
        await settled(agent)
        assert len(backend.trained) == 1
        judged.set()
        await asyncio.wait_for(task, PATIENCE)
    assert slow in backend.examples(2)
    assert [row["failures"] for row in metrics(tmp_path)] == [{}, {}, {}]


async def test_the_run_that_ended_last_counts_when_stragglers_are_looked_for(
    tmp_path: Path,
) -> None:
    backend = Backend()
    agent = Agent(backend)
    made = setup(tmp_path, backend, agent, groups_per_step=1)
    builder: Any = made.trajectory_builder
    for name in first_examples(made):
        agent.held |= {(name, place): asyncio.Event() for place in range(2)}
    async with training(made):
        await until(lambda: len(agent.runs) == 4)
        agent.held[first_examples(made)[0], 0].set()
        await settled(agent)
        assert builder._timer is not None, "half of the group's runs have ended"


async def test_a_group_that_begins_in_a_validation_is_pinned_to_the_step_it_measures(
    tmp_path: Path,
) -> None:
    backend = Backend(quick=False)
    backend.model_at = lambda step: f"p/m@{step}"  # type: ignore[attr-defined]
    agent = Agent(backend)
    made = setup(tmp_path, backend, agent, concurrency=3, pin_runs=True, target_model="m")
    user = made.config.workflow.model_copy(update={"llm": "user"})  # an LLM that is not trained
    made.config = made.config.model_copy(update={"workflow": user})
    made.validation, made.validation_interval = [Example("v", "q", "a", {})], 1
    idle, other = first_examples(made)[2], first_examples(made)[4]
    agent.reward = lambda name, generation: 0.0 if name == idle else float(generation)
    go_on = {name: asyncio.Event() for name in ("v", idle, other)}
    go_on["v"].set()
    agent.held = {(name, run): event for name, event in go_on.items() for run in range(2)}
    async with training(made) as task:
        await until(lambda: len(backend.trained) == 1)
        await settled(agent)
        go_on["v"].clear()
        backend.finish()
        await until(lambda: "-v-" in agent.runs[-1])
        go_on[idle].set()  # it teaches nothing, so another group takes its place
        started = made.trajectory_builder._started  # type: ignore[attr-defined]
        await until(lambda: 4 in started)
        assert started[4].runs[0].models == {"m": "p/m@1"}
        for event in go_on.values():
            event.set()
        for _ in range(2):
            backend.finish()
        await asyncio.wait_for(task, PATIENCE)
