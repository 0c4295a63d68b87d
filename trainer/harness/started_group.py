"""`StartedGroup`: the runs of one example under way, some of which may be left out in the end."""

import asyncio
from collections.abc import Callable

from trainer.harness.off_policy_rules import straggling_from
from trainer.harness.runner import Runner, unique
from trainer.harness.types import Example, Failure, WorkflowRun


class StartedGroup:
    """Starts the runs when it is created. `scored` waits for them.

    `on_ended` is called when one of them has ended, in any way.
    """

    def __init__(
        self,
        runner: Runner,
        example: Example,
        generations: int,
        label: str,
        on_ended: Callable[[], None],
        *,
        number: int,
        step: int,
        models: dict[str, str] | None = None,
        clock: Callable[[], float],
    ) -> None:
        self.step = step
        """The backend's step when the group started."""
        self._clock = clock
        self._began = clock()
        self._ages: list[float] = []
        """The age of the group when each of its runs ended."""
        self.runs = [WorkflowRun(example, it, number, models or {}) for it in range(generations)]
        self._runner = runner
        self._on_ended = on_ended
        self._over = asyncio.Event()
        label = unique(label)
        self._tasks = [asyncio.create_task(runner.run_once(run, label)) for run in self.runs]
        for task in self._tasks:
            task.add_done_callback(self._one_ended)

    @property
    def ended(self) -> list[WorkflowRun]:
        """The runs that have ended, in any way."""
        pairs = zip(self.runs, self._tasks, strict=True)
        return [run for run, task in pairs if task.done()]

    @property
    def running(self) -> int:
        return 0 if self._over.is_set() else len(self._tasks) - len(self._ages)

    @property
    def lags_in(self) -> float | None:
        """Seconds until the runs that have not ended are stragglers; None if none will be yet."""
        age = straggling_from(len(self.runs), self._ages) if self.running else None
        return None if age is None else max(0.0, self._began + age - self._clock())

    @property
    def lagging(self) -> float:
        """The share of its runs that have ended if it only waits for stragglers, and 0 if not."""
        return len(self._ages) / len(self.runs) if self.lags_in == 0 else 0.0

    async def scored(self) -> list[WorkflowRun]:
        """Wait until each run has ended or is left out, then score those that ended."""
        await self._over.wait()
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()):
                raise error
        await self._runner.score(self.runs)
        return self.runs

    def leave_out(self, failure: Failure, error: str) -> list[asyncio.Task[None]]:
        """Stop the runs that have not ended, which are lost; `scored` does not wait for them.

        Return their tasks: code that ignores that it is cancelled may take a few seconds more.
        """
        pairs = zip(self.runs, self._tasks, strict=True)
        stopped = {task: run for run, task in pairs if not task.done()}
        for task, run in stopped.items():
            run.fail(failure, error)
            task.cancel()
        self._over.set()
        return list(stopped)

    async def cancel(self) -> None:
        """Stop every run and wait until its code has ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _one_ended(self, _: object) -> None:
        self._ages.append(self._clock() - self._began)
        if len(self._ages) == len(self._tasks):
            self._over.set()
        self._on_ended()
