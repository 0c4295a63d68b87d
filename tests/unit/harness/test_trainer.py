"""The epoch loop with a fake builder and TrainerAdapter: validation, stopping, resume."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from rich.console import Console

from kit.errors import ConfigError
from trainer.errors import BackendBehind, NothingToTrainOn, TrainerError
from trainer.harness.components import ArtTrajectoryBuilderConfig
from trainer.harness.config import FinetuneConfig
from trainer.harness.context import Context
from trainer.harness.llm import Llms
from trainer.harness.progress import Progress
from trainer.harness.runner import Runner, _url_part
from trainer.harness.trainer import ARTTrainer
from trainer.harness.trajectory_builder import ARTTrajectoryBuilder
from trainer.harness.types import (
    EpisodeItem,
    EpisodeItemRole,
    Example,
    Failure,
    LostRun,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    Trajectory,
    TrajectoryCollection,
    WorkflowRun,
)

ITEM = EpisodeItem(role=EpisodeItemRole.USER, content="q")
LOST = LostRun(example_id="other", reason="workflow_failed", error="no")


class FakeBuilder:
    """Groups whose rewards are a function of the epoch."""

    def __init__(self, rewards: Callable[[int], list[list[float]]]) -> None:
        self.rewards = rewards
        self.epochs: list[int] = []

    async def initialize(self, config: Any) -> None: ...

    async def start_run(self, run_id: str, meta: Any = None) -> None:
        self.epochs.append(meta["epoch"])

    async def finalize(self, run_id: str, meta: Any = None) -> TrajectoryCollection:
        groups = [
            [Trajectory(episode=[ITEM], reward=reward) for reward in group]
            for group in self.rewards(meta["epoch"])
        ]
        return TrajectoryCollection(trajectories=groups, run_id=run_id, lost=[LOST])


class FakeAdapter:
    """A backend whose step advances with every job, except for the job number `fail_at`."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.step = 0
        self.fail_at = fail_at
        self.submitted: list[list[list[float]]] = []
        self.lost: list[LostRun] = []

    async def initialize(self, config: Any) -> None: ...

    async def current_step(self) -> int:
        return self.step

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        self.submitted.append(trajectories.rewards)
        self.lost = trajectories.lost
        return TrainingJobRef(run_id=trajectories.run_id, backend="fake")

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        failed = len(self.submitted) == self.fail_at
        self.step += not failed
        state = TrainingStatusEnum.FAILED if failed else TrainingStatusEnum.COMPLETED
        return TrainingJobStatus(
            run_id=ref.run_id, backend="fake", status=state, message="no memory" * failed
        )

    async def wait_until_complete(
        self, ref: TrainingJobRef, poll_interval: float = 0.1
    ) -> TrainingJobStatus:
        return await self.status(ref)

    async def cancel(self, ref: TrainingJobRef) -> None: ...


class FakeScorer:
    async def score(self, runs: list[WorkflowRun]) -> None:
        for run in runs:
            if run.failure is None:
                run.reward = float(run.output)


def rising(epoch: int) -> list[list[float]]:
    return [[0.1 * epoch, 0.1 * epoch + 0.2], [0.0, 0.9]]


def context(
    tmp_path: Path,
    builder: Any,
    adapter: Any,
    *,
    validation: Callable[[], float] | None = None,
    interval: int = 5,
    resume: bool = False,
    **finetuning: Any,
) -> Context:
    async def workflow(example: Example, llm: Any) -> float:
        return validation() if validation else 0.0

    config = FinetuneConfig.model_validate(
        {
            "llms": {"m": {"_type": "openai", "model_name": "m", "base_url": "http://127.0.0.1:9"}},
            "workflow": {"_type": "python", "function": "a:b", "llm": "m"},
            "eval": {"general": {"output_dir": tmp_path / "runs"}},
            "finetuning": {"output_dir": tmp_path, **finetuning},
        }
    )
    scorer: Any = FakeScorer()
    runner = Runner(
        workflow, Llms(config.llms), scorer,
        llm="m", max_concurrency=4, run_timeout=5, stop_on_failure=False,
    )  # fmt: skip
    return Context(
        config=config,
        runner=runner,
        examples=[],
        progress=Progress(Console(quiet=True)),
        trajectory_builder=builder,
        trainer_adapter=adapter,
        validation=[Example("v", "q", "a", {})] if validation else None,
        validation_interval=interval,
        resume=resume,
    )


async def train(context: Context, epochs: int) -> list[TrainingJobStatus]:
    trainer = ARTTrainer()
    await trainer.initialize(context)
    return await trainer.run(epochs)


def read(tmp_path: Path, name: str) -> Any:
    return json.loads((tmp_path / name).read_text())


async def test_validation_comes_before_the_first_epoch_every_interval_and_after_the_last(
    tmp_path: Path,
) -> None:
    setup = context(
        tmp_path, FakeBuilder(rising), FakeAdapter(), validation=lambda: 0.5, interval=2
    )
    await train(setup, 5)
    assert [row["epoch"] for row in read(tmp_path, "validation_history.json")] == [0, 2, 4, 5]


async def test_a_failed_job_stops_the_run_and_its_epoch_is_not_recorded(tmp_path: Path) -> None:
    statuses = await train(context(tmp_path, FakeBuilder(rising), FakeAdapter(fail_at=3)), 5)
    assert [status.status.value for status in statuses] == ["completed", "completed", "failed"]
    assert [row["epoch"] for row in read(tmp_path, "reward_history.json")] == [1, 2]


async def test_a_failed_epoch_is_submitted_again_on_resume_without_sampling_again(
    tmp_path: Path,
) -> None:
    first = FakeAdapter(fail_at=2)
    await train(context(tmp_path, FakeBuilder(rising), first), 3)
    builder, second = FakeBuilder(rising), FakeAdapter()
    second.step = first.step
    await train(context(tmp_path, builder, second, resume=True), 3)
    assert second.submitted[0] == first.submitted[1] == rising(1)
    assert second.lost == first.lost == [LOST], "a body that differs would be another step"
    assert builder.epochs == [2]
    assert [row["epoch"] for row in read(tmp_path, "reward_history.json")] == [1, 2, 3]


async def test_an_epoch_that_the_backend_has_trained_is_not_submitted_again(tmp_path: Path) -> None:
    first = FakeAdapter(fail_at=2)
    await train(context(tmp_path, FakeBuilder(rising), first), 3)
    second = FakeAdapter()
    second.step = first.step + 1  # the step is finished, and only its answer was lost
    await train(context(tmp_path, FakeBuilder(rising), second, resume=True), 3)
    assert second.submitted == [rising(2)]
    assert [row["epoch"] for row in read(tmp_path, "reward_history.json")] == [1, 2, 3]


async def test_resuming_on_a_backend_without_the_runs_steps_is_an_error(tmp_path: Path) -> None:
    await train(context(tmp_path, FakeBuilder(rising), FakeAdapter(fail_at=2)), 3)
    with pytest.raises(TrainerError, match="The backend is at step 0, but this run had reached"):
        await train(context(tmp_path, FakeBuilder(rising), FakeAdapter(), resume=True), 3)


async def test_a_run_stops_when_the_metric_no_longer_rises(tmp_path: Path) -> None:
    values = iter([0.1, 0.5, 0.6, 0.6, 0.55, 0.9, 0.9])
    setup = context(
        tmp_path, FakeBuilder(rising), FakeAdapter(), validation=lambda: next(values), interval=1,
        early_stopping={"patience": 2, "min_delta": 0.01},
    )  # fmt: skip
    assert len(await train(setup, 6)) == 4


async def test_a_run_stops_when_the_metric_reaches_the_target(tmp_path: Path) -> None:
    stop = {"metric": "avg_reward", "target": 0.35}
    setup = context(tmp_path, FakeBuilder(rising), FakeAdapter(), early_stopping=stop)
    await train(setup, 9)
    assert len(read(tmp_path, "reward_history.json")) == 3


async def test_groups_whose_rewards_are_equal_are_submitted_to_be_counted(tmp_path: Path) -> None:
    adapter = FakeAdapter()
    await train(context(tmp_path, FakeBuilder(lambda _: [[1.0, 1.0], [0.0, 1.0]]), adapter), 1)
    assert adapter.submitted == [[[1.0, 1.0], [0.0, 1.0]]]
    (row,) = map(json.loads, (tmp_path / "training_metrics.jsonl").read_text().splitlines())
    assert (row["filtered_groups"], row["filtered_avg_reward"], row["avg_reward"]) == (1, 0.5, 0.75)


async def test_nothing_to_train_on_from_the_start_is_an_error_with_the_reason(
    tmp_path: Path,
) -> None:
    setup = context(tmp_path, FakeBuilder(lambda _: [[1.0, 1.0]]), FakeAdapter())
    with pytest.raises(NothingToTrainOn, match="in 3 epochs: 1 groups: equal_rewards"):
        await train(setup, 10)


async def test_a_task_solved_late_in_a_run_is_no_error(tmp_path: Path) -> None:
    solved = FakeBuilder(lambda epoch: [[0.0, 1.0]] if epoch < 2 else [[1.0, 1.0]])
    assert len(await train(context(tmp_path, solved, FakeAdapter()), 8)) == 8


async def test_the_curriculum_is_applied_and_its_state_saved(tmp_path: Path) -> None:
    adapter = FakeAdapter()
    curriculum = {"enabled": True, "initial_percentile": 0.5, "expansion_interval": 1}
    await train(context(tmp_path, FakeBuilder(rising), adapter, curriculum_learning=curriculum), 2)
    assert adapter.submitted == [[[0.0, 0.9]], [[0.0, 0.9], [0.1, pytest.approx(0.3)]]]
    state = read(tmp_path, "curriculum_state.json")
    assert state["current_percentile"] == 0.7 and state["included_groups"] == [0, 1]


async def test_concurrency_and_run_time_are_limited() -> None:
    active = peak = 0

    async def workflow(example: Example, llm: Any) -> float:
        nonlocal active, peak
        active += 1
        peak = max(peak, active)
        await asyncio.sleep(9 if example.id == "0" else 0.01)
        active -= 1
        return 1.0

    llms = Llms(FinetuneConfig.model_validate(
        {"llms": {"m": {"_type": "openai", "model_name": "m"}},
         "workflow": {"_type": "python", "function": "a:b", "llm": "m"}}
    ).llms)  # fmt: skip
    scorer: Any = FakeScorer()
    runner = Runner(
        workflow, llms, scorer, llm="m", max_concurrency=3, run_timeout=5, stop_on_failure=False
    )
    done: list[WorkflowRun] = []
    examples = [Example(str(n), "q", "a", {}) for n in range(5)]
    groups = await runner.run(examples, 2, "r", done.append)
    assert peak == 3 and len(done) == 10
    assert [[run.failure for run in group] for group in groups[1:]] == [[None, None]] * 4
    assert {run.failure for run in groups[0]} == {"workflow_timed_out"}
    await llms.close()


async def test_a_second_run_in_the_same_directory_is_rejected(tmp_path: Path) -> None:
    first = ARTTrainer()
    await first.initialize(context(tmp_path, FakeBuilder(rising), FakeAdapter()))
    with pytest.raises(ConfigError, match="Another run is writing to"):
        await ARTTrainer().initialize(context(tmp_path, FakeBuilder(rising), FakeAdapter()))
    first.close()


async def test_a_finished_run_does_not_resume_on_an_empty_backend(tmp_path: Path) -> None:
    await train(context(tmp_path, FakeBuilder(rising), FakeAdapter()), 2)
    for epochs in (2, 3):
        with pytest.raises(BackendBehind, match="at step 0, but this run had reached 2"):
            await train(context(tmp_path, FakeBuilder(rising), FakeAdapter(), resume=True), epochs)
    await train(
        context(tmp_path, FakeBuilder(rising), FakeAdapter()), 2
    )  # the directory is unlocked


async def test_an_interrupted_first_epoch_is_resumed_too(tmp_path: Path) -> None:
    first = FakeAdapter(fail_at=1)
    await train(context(tmp_path, FakeBuilder(rising), first), 2)
    builder, second = FakeBuilder(rising), FakeAdapter()
    second.step = 1  # the step is finished, and only its answer was lost
    await train(context(tmp_path, builder, second, resume=True), 2)
    assert builder.epochs == [1] and second.submitted == [rising(1)]


async def test_validation_added_on_resume_has_no_entry_for_epoch_0(
    tmp_path: Path,
) -> None:
    first = FakeAdapter(fail_at=3)
    await train(context(tmp_path, FakeBuilder(rising), first), 4)
    second = FakeAdapter()
    second.step = first.step + 1  # the third epoch is trained
    setup = context(
        tmp_path, FakeBuilder(rising), second, validation=lambda: 0.5, interval=9, resume=True
    )
    await train(setup, 4)
    assert second.submitted == [rising(3)]
    assert [row["epoch"] for row in read(tmp_path, "validation_history.json")] == [4]


async def test_a_plateau_stops_a_run_without_min_delta(tmp_path: Path) -> None:
    setup = context(
        tmp_path, FakeBuilder(rising), FakeAdapter(), validation=lambda: 1.0, interval=1,
        early_stopping={"patience": 2},
    )  # fmt: skip
    assert len(await train(setup, 9)) == 2


async def test_early_stopping_on_validation_needs_a_validation_dataset(tmp_path: Path) -> None:
    setup = context(tmp_path, FakeBuilder(rising), FakeAdapter(), early_stopping={"patience": 2})
    with pytest.raises(ConfigError, match="no validation dataset"):
        await train(setup, 2)


@pytest.mark.parametrize("count", [6, 25])
async def test_an_epoch_over_two_passes_has_each_example_once(tmp_path: Path, count: int) -> None:
    setup = context(tmp_path, FakeBuilder(rising), FakeAdapter())
    setup.examples = [Example(f"e/{number}", "q", "a", {}) for number in range(10)]
    builder = ARTTrajectoryBuilder(
        ArtTrajectoryBuilderConfig.model_validate(
            {"_type": "openpipe_art_traj_builder", "examples_per_epoch": count}
        )
    )
    for epoch in range(5):
        chosen = [example.id for example in builder._examples(setup, epoch)]
        assert 0 < len(chosen) <= count and len(set(chosen)) == len(chosen)


def test_every_example_id_becomes_a_valid_and_unique_url_part() -> None:
    ids = ("HumanEval/0", "HumanEval_0", "HumanEval?0", "plain")
    names = [_url_part(WorkflowRun(Example(name, "q", "a", {}), 3)) for name in ids]
    assert len(set(names)) == 4 and names[-1] == "plain-3"
    assert all(quote(name, safe="") == name for name in names)


async def test_a_timeout_error_from_the_agent_is_a_workflow_failure(tmp_path: Path) -> None:
    setup = context(tmp_path, FakeBuilder(rising), FakeAdapter())

    async def workflow(example: Example, llm: Any) -> float:
        raise TimeoutError("the tool")

    setup.runner._workflow = workflow
    ((run,),) = await setup.runner.run([Example("e", "q", "a", {})], 1, "x", lambda run: None)
    assert (run.failure, run.error) == (Failure.WORKFLOW, "TimeoutError: the tool")
