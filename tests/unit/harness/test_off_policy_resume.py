"""Sampling ahead that goes on after a kill, after its end, or after taking turns."""

import asyncio
from collections import Counter
from pathlib import Path

from tests.unit.harness.sampling_ahead import (
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
from tests.unit.harness.test_trainer import FakeAdapter, FakeBuilder, context, read, rising
from trainer.harness.trainer import ARTTrainer


async def test_a_killed_run_trains_what_it_had_sampled_and_nothing_twice(tmp_path: Path) -> None:
    first = Backend(quick=False)
    agent = Agent(first)
    made = setup(tmp_path, first, agent, epochs=4)
    held = first_examples(made)[0]
    agent.held[held, 0] = asyncio.Event()
    async with training(made):
        await until(lambda: len(first.trained) == 1)
        await settled(agent)
        first.finish()
        await until(lambda: len(first.trained) == 2)
        await settled(agent)
    sampled = set(agent.runs)
    second = Backend()
    second.step = 1  # the backend was killed too, before it had trained the second step
    again = Agent(second)
    await train(setup(tmp_path, second, again, epochs=4, resume=True))
    assert second.trained[0] == first.trained[1], "a body that differs would be another step"
    names = [
        name for step in (*first.trained[:1], *second.trained) for group in step for name in group
    ]
    assert max(Counter(names).values()) == 1 and len(second.trained) == 3
    assert any(set(group) <= sampled for group in second.trained[1]), "complete groups are used"
    assert f"-{held}-" in "".join(again.runs), "one that was not complete is sampled again"
    assert [row["epoch"] for row in metrics(tmp_path)] == [1, 2, 3, 4]


async def test_a_step_that_the_backend_finished_is_not_trained_again(tmp_path: Path) -> None:
    first = Backend(fail_at=2)
    await train(setup(tmp_path, first, Agent(first)))
    second = Backend()
    second.step = 2  # the step is finished, and only its answer was lost
    await train(setup(tmp_path, second, Agent(second), resume=True))
    assert len(second.trained) == 1
    used = {name for step in first.trained for group in step for name in group}
    assert not used & {name for group in second.trained[0] for name in group}
    assert [row["epoch"] for row in metrics(tmp_path)] == [1, 2, 3]


async def test_damaged_lines_of_sampled_groups_are_sampled_again(tmp_path: Path) -> None:
    first = Backend(quick=False)
    agent = Agent(first)
    async with training(setup(tmp_path, first, agent)):
        await until(lambda: len(first.trained) == 1)
        await settled(agent)
    path = tmp_path / "sampled_groups.jsonl"
    lines = path.read_text().splitlines()
    assert len(lines) == 4, "the groups of a step stay until its epoch is recorded"
    path.write_text("\n".join([*lines[:2], '{"number": 2}', lines[3][:50]]))
    second = Backend()
    await train(setup(tmp_path, second, Agent(second), resume=True))
    assert second.trained[0] == first.trained[0]
    assert [len(step) for step in second.trained] == [2, 2, 2]
    assert len(second.examples(1) | second.examples(2) | second.examples(3)) == 6


async def test_a_finished_run_goes_on_with_fresh_examples(tmp_path: Path) -> None:
    first = Backend()
    await train(setup(tmp_path, first, Agent(first), epochs=2))
    second = Backend()
    second.step = 2
    await train(setup(tmp_path, second, Agent(second), epochs=4, resume=True))
    assert len(first.examples(1) | first.examples(2)) == 4
    assert len(second.examples(1) | second.examples(2)) == 4
    both = (first.examples(1) | first.examples(2)) & (second.examples(1) | second.examples(2))
    assert not both


async def test_a_run_that_took_turns_may_go_on_ahead(tmp_path: Path) -> None:
    first = FakeAdapter()
    turns = context(tmp_path, FakeBuilder(rising), first, num_epochs=2)
    trainer = ARTTrainer()
    await trainer.initialize(turns)
    await trainer.run(2)
    assert "position" not in read(tmp_path, "finetune_state.json")
    second = Backend()
    second.step = 2
    made = setup(tmp_path, second, Agent(second), epochs=3, resume=True)
    await train(made)
    assert second.examples(1) == set(first_examples(made)[4:6])
    assert [row["epoch"] for row in metrics(tmp_path)] == [1, 2, 3]


async def test_an_interrupted_epoch_that_took_turns_hides_no_used_groups(tmp_path: Path) -> None:
    first = Backend()
    agent = Agent(first)
    made = setup(tmp_path, first, agent, epochs=2)
    replaced = first_examples(made)[0:4:2]
    agent.reward = lambda name, generation: float(generation * (name not in replaced))
    await train(made)
    assert read(tmp_path, "finetune_state.json")["position"]["next"] == 6
    turns, second = FakeAdapter(fail_at=1), Backend()
    turns.step = second.step = first.step
    trainer = ARTTrainer()
    await trainer.initialize(
        context(tmp_path, FakeBuilder(rising), turns, num_epochs=3, resume=True)
    )
    await trainer.run(3)
    assert read(tmp_path, "pending_epoch.json")["position"] is None
    more = {"epochs": 5, "max_steps_off_policy": 9}  # none is too old
    await train(setup(tmp_path, second, Agent(second), resume=True, **more))
    used = {name for step in first.trained for group in step for name in group}
    assert len(second.trained) == 3
    assert not used & {name for step in second.trained for group in step for name in group}
