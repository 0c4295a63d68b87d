"""`OffPolicyBuilder`: samples the groups of the next steps while the backend trains.

It has the interface of every trajectory builder, and an epoch is one step: `start_run` says that
groups are wanted for a step, and `finalize` returns as soon as enough of them are complete. The
epoch before may still train then; `epoch_ended` says when it no longer does. Sampling is never more
than `max_steps_off_policy` steps ahead.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from kit.types import Json
from trainer.harness import curriculum, episodes
from trainer.harness.complete_groups import FEWEST_RUNS, CompleteGroups
from trainer.harness.components import ArtTrajectoryBuilderConfig
from trainer.harness.context import Context
from trainer.harness.metrics import plain
from trainer.harness.off_policy_rules import Limits
from trainer.harness.policy_steps import PolicySteps
from trainer.harness.runner import commonest_failure, failures, record, warn_of_failures
from trainer.harness.sampled_groups import GroupFile, Position, SampledGroup, unfinished
from trainer.harness.started_group import StartedGroup
from trainer.harness.trajectory_builder import build, collect, example_at, sampled_by
from trainer.harness.types import Failure, LostRun, TrajectoryCollection
from trainer.measurements import mean_metrics

logger = logging.getLogger(__name__)
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
        self.policy: PolicySteps
        self._limits: Limits
        self._file: GroupFile
        self._next = 0
        self._again: deque[int] = deque()
        """Groups that an earlier program started and did not finish."""
        self._started: dict[int, StartedGroup] = {}
        self._complete: CompleteGroups
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        self._run_id = ""
        self._left = 0
        """How many epochs have not got their groups yet."""
        self._under_way: deque[list[SampledGroup]] = deque()
        """The groups of the epochs that have got theirs and have not ended."""
        self._collecting = False
        """Whether an epoch waits for its groups now."""
        self._watch = contextlib.ExitStack()
        self._timer: asyncio.TimerHandle | None = None
        self.clock: Callable[[], float] = time.monotonic

    async def initialize(self, config: Context) -> None:
        settings = config.config.finetuning
        self._context = config
        pinned = config.target_llm if settings.pin_runs else None
        self.policy = PolicySteps(config.trainer_adapter, pinned=pinned)
        groups = settings.groups_per_step or self.config.examples_per_epoch
        self._limits = Limits(
            settings.max_steps_off_policy, groups or len(config.examples), settings.oversample
        )
        self._file = GroupFile(config.output_dir)

    @property
    def pinned_steps(self) -> set[int]:
        """The steps that runs under way, or started next, sample from to their end."""
        steps = {self.policy.served, *(group.step for group in self._started.values())}
        return steps if self.policy.pins else set()

    def resume(self, position: Position | None, epoch: int, interrupted: int = 0) -> None:
        """Continue with the groups that no epoch has used. Call it before the first epoch.

        The first `interrupted` epochs after `epoch` have got their groups already.
        """
        self._under_way.extend([] for _ in range(interrupted))
        # Without a position, the run is new or has taken turns so far.
        self.position = position or Position(next=epoch * self._limits.groups)
        groups = self._file.read(self.position)
        self._complete = CompleteGroups(self._limits, self._teaches, groups.values())
        self._next = max([self.position.next, *(number + 1 for number in groups)])
        self._again = deque(unfinished(self.position, groups, self._next))
        if groups:
            logger.info("%s groups were sampled before the restart", len(groups))

    async def start_run(self, run_id: str, meta: Json | None = None) -> None:
        """Say that groups are wanted for the next step. They may be complete by now."""
        context = self._ready()
        await self.policy.ask()
        self._complete.begin(await self.policy.newest())
        if not self._run_id:
            self._watch.enter_context(context.runner.watched())
        self._run_id = run_id
        self._left = context.config.finetuning.num_epochs - (meta or {}).get("epoch", 0)
        self._collecting = True
        self._start_more()

    async def finalize(self, run_id: str, meta: Json | None = None) -> TrajectoryCollection:
        """Return the groups for the next step, once they are complete, and go on sampling."""
        context = self._ready()
        self._check()
        await self._collect()
        while (step := await self.policy.newest()) != self._complete.step:
            self._complete.begin(step)  # another client trained the model meanwhile
            self._start_more()
            await self._collect()
        taken, self.ages = self._complete.take()
        self._under_way.append(taken)
        self._left, self._collecting = self._left - 1, False
        self.position = Position(
            self._next, sorted({*self._started, *self._complete.numbers, *self._again})
        )
        self._start_more()
        lost_runs = self._summarize(taken)
        groups = [group.trajectories for group in taken if group.trajectories]
        records = (row for group in taken for row in group.records)
        return collect(context, run_id, meta, groups, lost_runs, records)

    async def epoch_ended(self) -> None:
        """Say that the oldest epoch under way is in the history, and its step is served."""
        newest = await self.policy.newest()
        self._under_way.popleft()  # no `await` from here on: groups start by both
        waiting = itertools.chain(*self._under_way, self._complete)
        self._file.keep(group.number for group in waiting)
        if self._collecting:
            self._complete.begin(newest)
        self._changed.set()
        self._start_more()

    async def cancel(self) -> None:
        """Stop sampling. Complete groups stay in their file for `--resume`."""
        self._left = 0
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

    def _teaches(self, rewards: Sequence[float]) -> bool:
        config = self._ready().config.finetuning.curriculum_learning
        return len(set(rewards)) > 1 and curriculum.differ(config, rewards)

    def _enough(self) -> bool:
        """Whether a step can begin. Shows how many of its groups are complete."""
        ready, idle = self._complete.divided()
        self._ready().progress.groups(len(ready), self._limits.groups)
        # While another epoch trains, there is time for more: an outage may be over by then.
        counted = 0 if self._under_way else len(idle)
        return self._limits.enough(ready=len(ready), idle=counted)

    async def _collect(self) -> None:
        """Wait until a step can begin, and no group would go stale if it did."""
        while not self._enough():
            await self._change()
        # While another epoch trains, there is time for those that no later step can use.
        while self._under_way and any(
            self._limits.is_due(group.step, self._complete.step) for group in self._started.values()
        ):
            await self._change()
        await self._leave_out_stragglers()

    async def _change(self) -> None:
        """Wait until a group or an epoch has ended, and raise if a group could not be sampled."""
        self._changed.clear()
        await self._changed.wait()
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _due(self) -> dict[int, StartedGroup]:
        """Return the groups that would be too old for a later step, and have enough runs."""
        context = self._ready()
        found = {}
        for number, group in self._started.items():
            ended = [run for run in group.ended if run.failure is None]
            steps = [sampled_by(context, run, group.step) for run in ended]
            if sum(self._limits.is_due(step, self._complete.step) for step in steps) >= FEWEST_RUNS:
                found[number] = group
        return found

    async def _leave_out_stragglers(self) -> None:
        """Complete the groups that are due without their stragglers."""
        due = self._due()
        for group in due.values():
            if group.running:
                self._keep(group.leave_out(Failure.STALE, LEFT_OUT))
        while any(number in self._started for number in due):  # until they are scored
            await self._change()

    def _start_more(self) -> None:
        """Start groups as far ahead as allowed, but none that would only wait for a free slot.

        A group that starts later is sampled by a newer step, and validation finds a short queue.
        """
        context = self._ready()
        slots = context.config.eval.general.max_concurrency
        ready, idle = self._complete.divided()
        while (
            self._error is None
            and sum(group.running for group in self._started.values()) < slots
            and self._limits.may_start(
                min(self._limits.max_age + 1 - len(self._under_way), self._left),
                waits=self._collecting and not self._under_way,
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
                step=self.policy.served,
                models=self.policy.models,
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
            self._complete.add(sampled)
        except Exception as error:  # the next `finalize` raises it
            self._error = self._error or error
        del self._started[number]
        self._changed.set()
        self._start_more()

    def _ready(self) -> Context:
        if self._context is None:
            raise RuntimeError("Call initialize() first")
        return self._context
