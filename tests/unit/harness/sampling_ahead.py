"""A backend and an agent that go on when the test lets them, to test sampling ahead."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.unit.harness.test_trainer import FakeAdapter, context
from trainer.harness.components import ArtTrajectoryBuilderConfig
from trainer.harness.context import Context
from trainer.harness.llm import Llm
from trainer.harness.off_policy import OffPolicyBuilder
from trainer.harness.trainer import ARTTrainer
from trainer.harness.trajectory_builder import example_at
from trainer.harness.types import (
    Completion,
    Example,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    TrajectoryCollection,
)

PATIENCE = 60  # seconds after which a test that waits has failed


@dataclass
class Agent:
    """Samples once with the backend's step. A run in `held` ends when its event is set."""

    backend: "Backend"
    reward: Callable[[str, int], float] = lambda _, generation: float(generation)
    held: dict[tuple[str, int], asyncio.Event] = field(default_factory=dict)
    runs: list[str] = field(default_factory=list)
    """Rollout ids of all runs. Each is the first message of its trajectory."""
    cancelled: list[tuple[str, int]] = field(default_factory=list)

    async def __call__(self, example: Example, llm: Llm) -> float:
        rollout = llm._rollout.id
        generation = int(rollout.rpartition("-")[2])
        self.runs.append(rollout)
        message = {"role": "assistant", "content": "a"}
        logprobs = {"content": [{"token": "a", "logprob": -1.0}]}
        llm._rollout.completions.append(
            Completion(
                llm="m",
                function=None,
                messages=[{"role": "user", "content": rollout}],
                choice={"index": 0, "message": message, "logprobs": logprobs},
                policy_step=self.backend.step,
                recorded=False,
            )
        )
        if event := self.held.get((example.id, generation)):
            try:
                await event.wait()
            except asyncio.CancelledError:
                self.cancelled.append((example.id, generation))
                raise
        return self.reward(example.id, generation)

    @property
    def groups(self) -> int:
        return len({rollout.rpartition("-")[0] for rollout in self.runs})


class Backend(FakeAdapter):
    """Finishes a step when `finish` was called for it, or at once if it is `quick`."""

    def __init__(self, *, quick: bool = True, fail_at: int | None = None) -> None:
        super().__init__(fail_at)
        self.quick = quick
        self.trained: list[list[list[str]]] = []
        """Rollout ids of each step's groups."""
        self._finish = asyncio.Queue[None]()

    def finish(self) -> None:
        self._finish.put_nowait(None)

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        self.trained.append(
            [[one.episode[0].content for one in group] for group in trajectories.trajectories]
        )
        return await super().submit(trajectories)

    async def wait_until_complete(
        self, ref: TrainingJobRef, poll_interval: float = 0.1
    ) -> TrainingJobStatus:
        if not self.quick:
            await self._finish.get()
        return await self.status(ref)

    def examples(self, step: int) -> set[str]:
        """Ids of the examples that made `step`."""
        return {name.split("-")[-2] for group in self.trained[step - 1] for name in group}


class QueueingBackend(Backend):
    """Takes the next step while one trains. The step `fail_at` fails, and those after it."""

    def __init__(self, step: int = 0, *, fail_at: int | None = None) -> None:
        super().__init__(quick=False)
        self.step = self._submitted = step
        self._fails = fail_at

    async def newest_step(self) -> int:
        return max(self.step, self._submitted)

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        ref = await super().submit(trajectories)
        self._submitted += 1
        return ref.model_copy(update={"metadata": {"step": self._submitted}})

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        step = (ref.metadata or {})["step"]
        if self._fails is not None and step >= self._fails:
            failed = TrainingStatusEnum.FAILED
            return TrainingJobStatus(run_id=ref.run_id, backend="fake", status=failed)
        assert step == self.step + 1, "steps end in order"
        self.step = step
        done = TrainingStatusEnum.COMPLETED
        return TrainingJobStatus(
            run_id=ref.run_id, backend="fake", status=done, metadata={"step": step}
        )


def setup(
    tmp_path: Path,
    backend: Backend,
    agent: Agent,
    *,
    examples: int = 20,
    generations: int = 2,
    concurrency: int = 100,
    epochs: int = 3,
    **settings: Any,
) -> Context:
    config = ArtTrajectoryBuilderConfig(
        _type="openpipe_art_traj_builder", num_generations=generations
    )
    settings = {"max_steps_off_policy": 1, "groups_per_step": 2, "num_epochs": epochs} | settings
    builder = OffPolicyBuilder(config)
    builder.clock = lambda: 0.0  # a slow machine makes no stragglers
    made = context(tmp_path, builder, backend, **settings)
    general = made.config.eval.general.model_copy(update={"max_concurrency": concurrency})
    made.config = made.config.model_copy(
        update={"eval": made.config.eval.model_copy(update={"general": general})}
    )
    made.runner._slots = asyncio.Semaphore(concurrency)
    made.runner._workflow = agent
    made.examples = [Example(f"e{number}", "q", "a", {}) for number in range(examples)]
    return made


async def train(made: Context) -> list[TrainingJobStatus]:
    async with training(made) as task:
        return await asyncio.wait_for(task, PATIENCE)


@asynccontextmanager
async def training(made: Context) -> AsyncIterator["asyncio.Task[list[TrainingJobStatus]]"]:
    """Train in a task, which ends with the block as if the program was killed."""
    trainer = ARTTrainer()
    builder: Any = made.trajectory_builder
    try:
        await trainer.initialize(made)
        task = asyncio.create_task(trainer.run(made.config.finetuning.num_epochs))
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    finally:
        await builder.cancel()
        trainer.close()


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not happened():
            await asyncio.sleep(0.005)


async def settled(agent: Agent) -> int:
    """Return the number of groups once no more are started, with all that could run having run."""
    before = -1
    while before != agent.groups:
        before = agent.groups
        for _ in range(200):
            await asyncio.sleep(0)
    return before


def first_examples(made: Context) -> list[str]:
    """Ids of the examples in the order in which they start."""
    return [example_at(made, position).id for position in range(len(made.examples))]


def metrics(tmp_path: Path) -> list[Any]:
    lines = (tmp_path / "training_metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
