"""`ARTTrajectoryBuilder`: runs the workflow several times per example and groups the results."""

import asyncio
import logging
import random
from collections.abc import Iterable, Sequence
from functools import lru_cache

from kit.types import Json
from trainer.harness import episodes
from trainer.harness.components import ArtTrajectoryBuilderConfig
from trainer.harness.context import Context
from trainer.harness.metrics import write_jsonl
from trainer.harness.progress import EACH_EPOCH
from trainer.harness.runner import commonest_failure, failures, record, warn_of_failures
from trainer.harness.types import (
    Completion,
    Example,
    LostRun,
    Trajectory,
    TrajectoryCollection,
    WorkflowRun,
)
from trainer.measurements import mean_metrics

logger = logging.getLogger(__name__)


class ARTTrajectoryBuilder:
    """`start_run` starts the runs of an epoch; `finalize` waits for them and groups them."""

    def __init__(self, config: ArtTrajectoryBuilderConfig) -> None:
        self.config = config
        self.lost: dict[str, int] = {}
        """Number of the last epoch's runs without a trajectory, by reason."""
        self.commonest_failure = ""
        """The error that most of the last epoch's lost runs have."""
        self.metrics: dict[str, float] = {}
        """Means of the evaluators' metrics over the last epoch's runs."""
        self._context: Context | None = None
        self.evaluation_runs: dict[str, asyncio.Task[list[list[WorkflowRun]]]] = {}

    async def initialize(self, config: Context) -> None:
        self._context = config

    async def start_run(self, run_id: str, meta: Json | None = None) -> None:
        """Start `num_generations` runs of every example, and return without waiting for them."""
        context = self._ready()
        generations = self.config.num_generations
        logger.info(
            "Starting %s evaluation runs for run_id: %s", generations, run_id, extra=EACH_EPOCH
        )
        epoch = (meta or {}).get("epoch", 0)
        examples = self._examples(context, epoch)
        context.progress.phase("sampling", generations * len(examples))
        self.evaluation_runs[run_id] = asyncio.create_task(
            context.runner.run(
                examples, generations, f"{run_id}-{epoch}", context.progress.run_done
            )
        )

    async def finalize(self, run_id: str, meta: Json | None = None) -> TrajectoryCollection:
        """Return the trajectories grouped by example. An example without any has no group."""
        context = self._ready()
        try:
            runs = await self.evaluation_runs.pop(run_id)
        except ExceptionGroup as group:
            raise group.exceptions[0] from None  # the first error cancelled the others
        built = [
            [trajectory for run in group if (trajectory := build(context, run)) is not None]
            for group in runs
        ]
        groups = [group for group in built if group]
        lost = episodes.lost(runs)
        self.lost = failures(lost)
        self.commonest_failure = commonest_failure(lost)
        self.metrics = mean_metrics(
            run.metrics for group in runs for run in group if run.failure is None
        )
        warn_of_failures(lost)
        records = (record(run) for group in runs for run in group)
        return collect(context, run_id, meta, groups, lost, records)

    async def cancel(self) -> None:
        for task in self.evaluation_runs.values():
            task.cancel()
        await asyncio.gather(*self.evaluation_runs.values(), return_exceptions=True)

    def _examples(self, context: Context, epoch: int) -> Sequence[Example]:
        """Return the epoch's examples. The dataset is shuffled for each pass through it."""
        count = self.config.examples_per_epoch
        if count is None:
            return context.examples
        chosen = [
            example_at(context, position) for position in range(epoch * count, (epoch + 1) * count)
        ]
        # An epoch that spans two passes may draw an example twice. Records are found by the
        # example's id, so it runs only once.
        return list({example.id: example for example in chosen}.values())

    def _ready(self) -> Context:
        if self._context is None:
            raise RuntimeError("Call initialize() first")
        return self._context


def example_at(context: Context, position: int) -> Example:
    """Return an example of the endless series. It is shuffled for each pass through the dataset."""
    number, place = divmod(position, len(context.examples))
    order = _order(f"{context.config.finetuning.seed}/{number}", len(context.examples))
    return context.examples[order[place]]


@lru_cache(maxsize=4)  # shuffling a large dataset for every example would be slow
def _order(seed: str, total: int) -> list[int]:
    order = list(range(total))
    random.Random(seed).shuffle(order)
    return order


def build(context: Context, run: WorkflowRun) -> Trajectory | None:
    """Return the run's trajectory, from the calls that are trained; None if it is lost."""
    if run.failure is not None:
        return None
    return episodes.build(run, trained_calls(context, run))


def trained_calls(context: Context, run: WorkflowRun) -> list[Completion]:
    """Return the run's calls to the target model from the target functions."""
    return episodes.select_completions(run.completions, context.functions, context.target_llm)


def sampled_by(context: Context, run: WorkflowRun, started: int) -> int:
    """Return the step that sampled the run's oldest choice.

    An endpoint that does not say its step sampled at the earliest when the run's group `started`.
    """
    steps = [call.policy_step for call in trained_calls(context, run)]
    return min((step for step in steps if step is not None), default=started)


def collect(
    context: Context,
    run_id: str,
    meta: Json | None,
    groups: list[list[Trajectory]],
    lost: list[LostRun],
    records: Iterable[Json],
) -> TrajectoryCollection:
    """Write the records of an epoch's runs, and return its groups."""
    epoch = (meta or {}).get("epoch", 0)
    path = context.config.eval.general.output_dir / f"epoch_{epoch + 1:04d}.jsonl"
    write_jsonl(path, records)
    logger.info(
        "Built %s trajectories across %s examples for run_id: %s",
        sum(map(len, groups)),
        len(groups),
        run_id,
        extra=EACH_EPOCH,
    )
    return TrajectoryCollection(trajectories=groups, run_id=run_id, lost=lost)
