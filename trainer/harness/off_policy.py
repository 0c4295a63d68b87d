"""`OffPolicyBuilder`: samples the groups of the next steps while the backend trains.

It has the interface of every trajectory builder, and an epoch is one step: `start_run` says that a
step may begin, and `finalize` returns as soon as enough groups are complete. Sampling goes on
after that, at most `max_steps_off_policy` steps ahead.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from kit.errors import ConfigError
from kit.types import Json
from trainer.harness import curriculum, episodes
from trainer.harness.components import ArtTrajectoryBuilderConfig
from trainer.harness.context import Context
from trainer.harness.metrics import plain
from trainer.harness.off_policy_rules import Limits, divide
from trainer.harness.runner import commonest_failure, failures, record, warn_of_failures
from trainer.harness.sampled_groups import GroupFile, Position, SampledGroup, ages, unfinished
from trainer.harness.started_group import StartedGroup
from trainer.harness.trajectory_builder import build, collect, example_at, sampled_by
from trainer.harness.types import Failure, LostRun, TrajectoryCollection
from trainer.measurements import mean_metrics

logger = logging.getLogger(__name__)
FEWEST_RUNS = 2  # fewer cannot be compared with each other
LEFT_OUT = "it had not ended when the other runs of its example had to be trained"


class OffPolicyBuilder:
    """Samples groups in a series without an end. Each epoch takes those that are complete."""

    def __init__(self, config: ArtTrajectoryBuilderConfig) -> None:
        self.config = config
        self.lost: dict[str, int] = {}
        """Number of the last epoch's runs without a trajectory, by reason."""
        self.commonest_failure = ""
        self.metrics: dict[str, float] = {}
        """Means of the evaluators' metrics over the last epoch's runs."""
        self.ages: dict[str, float] = {}
        """Steps between the sampling of the last epoch's trained runs and their training."""
        self.position = Position()
        """The groups that no epoch has used, after the last epoch."""
        self._context: Context | None = None
        self._current_step: Callable[[], Awaitable[int]]
        self._limits: Limits
        self._file: GroupFile
        self._next = 0
        self._again: deque[int] = deque()
        """Groups that an earlier program started and did not finish."""
        self._started: dict[int, StartedGroup] = {}
        self._finished: dict[int, SampledGroup] = {}
        self._written_off: set[int] = set()
        """Complete groups that lost their runs before this step: it samples as if without them."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        self._run_id = ""
        self._step = 0
        self._steps = 0
        """How many steps can still use a group that starts now."""
        self._waits = False
        """Whether a step waits for its groups now."""
        self._watch = contextlib.ExitStack()
        self._timer: asyncio.TimerHandle | None = None
        self.clock: Callable[[], float] = time.monotonic

    async def initialize(self, config: Context) -> None:
        settings = config.config.finetuning
        current_step = getattr(config.trainer_adapter, "current_step", None)
        if current_step is None:
            raise ConfigError(
                "`finetuning.max_steps_off_policy` needs a trainer adapter with `current_step`",
                hint="Add the method to your adapter, or set `max_steps_off_policy: 0`",
            )
        self._context, self._current_step = config, current_step
        groups = settings.groups_per_step or self.config.examples_per_epoch
        self._limits = Limits(
            settings.max_steps_off_policy, groups or len(config.examples), settings.oversample
        )
        self._file = GroupFile(config.output_dir)

    def resume(self, position: Position | None, epoch: int) -> None:
        """Continue with the groups that no epoch has used. Call it before the first epoch."""
        # Without a position, the run is new or has taken turns so far.
        self.position = position or Position(next=epoch * self._limits.groups)
        self._finished = self._file.read(self.position)
        self._next = max([self.position.next, *(number + 1 for number in self._finished)])
        self._again = deque(unfinished(self.position, self._finished, self._next))
        if self._finished:
            logger.info("%s groups were sampled before the restart", len(self._finished))

    async def start_run(self, run_id: str, meta: Json | None = None) -> None:
        """Say that the next step may begin. The groups for it may be complete already."""
        context = self._ready()
        self._begin(int(await self._current_step()))
        self._file.keep(self._finished.values())  # the epochs before are committed
        if not self._run_id:
            self._watch.enter_context(context.runner.watched())
        self._run_id = run_id
        left = context.config.finetuning.num_epochs - (meta or {}).get("epoch", 0)
        self._steps, self._waits = min(self._limits.max_age + 1, left), True
        self._start_more()

    async def finalize(self, run_id: str, meta: Json | None = None) -> TrajectoryCollection:
        """Return the groups for the next step, once they are complete, and go on sampling."""
        context = self._ready()
        self._check()
        await self._collect()
        while (step := int(await self._current_step())) != self._step:
            self._begin(step)  # another client trained the model meanwhile
            self._start_more()
            await self._collect()
        trained, idle = self._limits.take(*self._divided(), self._step)
        lost = [self._finished[number] for number in self._written_off]
        taken = sorted([*trained, *idle, *lost], key=lambda group: group.number)
        self._written_off = set()
        self.ages = ages(trained, self._step)
        for group in taken:
            del self._finished[group.number]
        self._steps, self._waits = min(self._limits.max_age, self._steps - 1), False
        self.position = Position(
            self._next, sorted({*self._started, *self._finished, *self._again})
        )
        self._start_more()
        lost_runs = self._summarize(taken)
        groups = [group.trajectories for group in taken if group.trajectories]
        records = (row for group in taken for row in group.records)
        return collect(context, run_id, meta, groups, lost_runs, records)

    async def cancel(self) -> None:
        """Stop sampling. Complete groups stay in their file for `--resume`."""
        self._steps = 0
        for task in self._tasks:
            task.cancel()
        groups = [group.cancel() for group in self._started.values()]
        await asyncio.gather(*self._tasks, *groups, return_exceptions=True)
        if self._timer:  # not before: every run that ends sets it anew
            self._timer.cancel()
        self._watch.close()

    def _summarize(self, taken: Sequence[SampledGroup]) -> list[LostRun]:
        """Compute what the epoch reports of its groups, and return its lost runs."""
        lost = [run for group in taken for run in group.lost]
        self.lost = failures(lost)
        self.commonest_failure = commonest_failure(lost)
        self.metrics = mean_metrics(one.metrics for group in taken for one in group.trajectories)
        warn_of_failures(lost)
        return lost

    def _begin(self, step: int) -> None:
        """Make the complete groups ready for training from `step`.

        Groups that lost their runs, in an outage or by their age, say nothing about the examples.
        They are reported with this step, but do not count among the groups sampled for it.
        """
        self._step = step
        for number, group in self._finished.items():
            self._finished[number] = self._current(group)
        self._written_off = {
            number
            for number, group in self._finished.items()
            if len(group.trajectories) < FEWEST_RUNS
        }

    def _divided(self) -> tuple[list[SampledGroup], list[SampledGroup]]:
        counted = self._finished.keys() - self._written_off
        return divide((self._finished[number] for number in counted), self._teaches)

    def _teaches(self, rewards: Sequence[float]) -> bool:
        config = self._ready().config.finetuning.curriculum_learning
        return len(set(rewards)) > 1 and curriculum.differ(config, rewards)

    def _current(self, group: SampledGroup) -> SampledGroup:
        """Return the group without stale runs. One that teaches nothing is not lost by its age."""
        if not self._teaches(group.rewards):
            return group
        return group.without_stale(self._step, self._limits.max_age)

    def _enough(self) -> bool:
        """Whether a step can begin. Shows how many of its groups are complete."""
        ready, idle = self._divided()
        self._ready().progress.groups(len(ready), self._limits.groups)
        return self._limits.enough(ready=len(ready), idle=len(idle))

    async def _collect(self) -> None:
        """Wait until a step can begin, and no group would go stale if it did."""
        while not self._enough():
            await self._change()
        await self._leave_out_stragglers()

    async def _change(self) -> None:
        """Wait until a group has ended, and raise if it could not be sampled."""
        self._changed.clear()
        await self._changed.wait()
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    async def _leave_out_stragglers(self) -> None:
        """Complete the groups that would be too old for a later step, without their stragglers."""
        context = self._ready()
        waiting = []
        for number, group in list(self._started.items()):
            ended = [run for run in group.ended if run.failure is None]
            steps = [sampled_by(context, run, group.step) for run in ended]
            if sum(self._limits.is_due(step, self._step) for step in steps) >= FEWEST_RUNS:
                if group.running:
                    self._keep(group.leave_out(Failure.STALE, LEFT_OUT))
                waiting.append(number)  # until it is scored
        while any(number in self._started for number in waiting):
            await self._change()

    def _start_more(self) -> None:
        """Start groups as far ahead as allowed, but none that would only wait for a free slot.

        A group that starts later is sampled by a newer step, and validation finds a short queue.
        """
        context = self._ready()
        slots = context.config.eval.general.max_concurrency
        ready, idle = self._divided()
        while (
            self._error is None
            and sum(group.running for group in self._started.values()) < slots
            and self._limits.may_start(
                self._steps,
                waits=self._waits,
                live=len(self._started) + len(ready),
                idle=len(idle),
                lagging=[group.lagging for group in self._started.values() if group.lagging],
            )
        ):
            number = self._again.popleft() if self._again else self._next
            self._next = max(self._next, number + 1)
            group = StartedGroup(
                context.runner,
                example_at(context, number),
                self.config.num_generations,
                f"{self._run_id}-group-{number}",
                self._more_may_start,
                number=number,
                step=self._step,
                clock=self.clock,
            )
            self._started[number] = group
            self._keep([asyncio.create_task(self._finish(number, group))])

    def _more_may_start(self) -> None:
        """Start groups now, and again as soon as one more only waits for stragglers."""
        self._start_more()
        if self._timer:
            self._timer.cancel()
        waits = [wait for group in self._started.values() if (wait := group.lags_in)]
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(min(waits), self._more_may_start) if waits else None

    def _keep(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Hold tasks until they are done: the event loop alone would let go of them."""
        self._tasks.update(tasks)
        for task in tasks:
            task.add_done_callback(self._tasks.discard)

    async def _finish(self, number: int, group: StartedGroup) -> None:
        """Wait for a group, write it to the file, and make it available."""
        context = self._ready()
        try:
            runs = await group.scored()
            built = [(run, build(context, run)) for run in runs]
            sampled = SampledGroup(
                number=number,
                trajectories=[found for _, found in built if found is not None],
                sampled_by=[
                    sampled_by(context, run, group.step)
                    for run, found in built
                    if found is not None
                ],
                lost=episodes.lost([runs]),
                records=[plain(record(run)) for run in runs],
            )
            self._file.append(sampled)
            self._finished[number] = self._current(sampled)
        except Exception as error:  # the next `finalize` raises it
            self._error = self._error or error
        del self._started[number]
        self._changed.set()
        self._start_more()

    def _ready(self) -> Context:
        if self._context is None:
            raise RuntimeError("Call initialize() first")
        return self._context
