"""Runs the workflow on examples concurrently, each run with a time limit, and scores them."""

import asyncio
import hashlib
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from kit.errors import ConfigError
from trainer.errors import RunFailed
from trainer.harness import episodes
from trainer.harness.evaluators import Scorer
from trainer.harness.llm import Llms, Workflow
from trainer.harness.types import Example, Failure, LostRun, Outcome, WorkflowRun
from trainer.harness.user_code import TookTooLong, within
from trainer.harness.user_texts import error_text, text_of
from trainer.harness.watchdog import watch

logger = logging.getLogger(__name__)
OnDone = Callable[[WorkflowRun], None]
OnGroup = Callable[[list[WorkflowRun]], None]


class Runner:
    """One workflow with its LLMs and evaluators."""

    def __init__(
        self,
        workflow: Workflow,
        llms: Llms,
        scorer: Scorer,
        *,
        llm: str | None,
        max_concurrency: int,
        run_timeout: float,
        stop_on_failure: bool,
    ) -> None:
        self._workflow = workflow
        self._llms = llms
        self._scorer = scorer
        if not llms.endpoints:
            raise ConfigError("The config has no `llms`", hint="Add at least one endpoint")
        self._llm = llm or next(iter(llms.endpoints))
        self._slots = asyncio.Semaphore(max_concurrency)
        self._timeout = run_timeout
        self._stop_on_failure = stop_on_failure

    async def run(
        self,
        examples: Sequence[Example],
        generations: int,
        label: str,
        on_done: OnDone,
        on_group: OnGroup | None = None,
    ) -> list[list[WorkflowRun]]:
        """Run every example `generations` times. The runs of one example form a group.

        `on_done` receives each run as it ends, and `on_group` each group when it is scored.
        """
        label = unique(label)
        with self.watched():
            async with asyncio.TaskGroup() as tasks:
                groups = [
                    tasks.create_task(self._group(example, generations, label, on_done, on_group))
                    for example in examples
                ]
        return [group.result() for group in groups]

    async def _group(
        self,
        example: Example,
        generations: int,
        label: str,
        on_done: OnDone,
        on_group: OnGroup | None,
    ) -> list[WorkflowRun]:
        runs = [WorkflowRun(example, generation) for generation in range(generations)]
        await asyncio.gather(*(self.run_once(run, label, on_done) for run in runs))
        await self.score(runs)
        if on_group is not None:
            on_group(runs)
        return runs

    def watched(self) -> AbstractContextManager[None]:
        """Interrupt code that blocks the event loop. `run` does it itself."""
        return watch(self._timeout)

    async def score(self, runs: Sequence[WorkflowRun]) -> None:
        """Score the runs of one example. Raise if one failed and `on_failure` is `stop`."""
        await self._scorer.score(runs)
        for run in runs:
            if run.failure is not None:
                logger.debug("%s: %s", run.failure, run.error)
                if self._stop_on_failure and run.failure != Failure.STALE:
                    raise RunFailed(f"A run on example `{run.example.id}` failed: {run.error}")

    async def run_once(
        self, run: WorkflowRun, label: str, on_done: OnDone = lambda _: None
    ) -> None:
        """Run the workflow once, when one of `max_concurrency` slots is free."""
        async with self._slots:
            handle = self._llms.handle(f"{label}-{_url_part(run)}", self._llm, run.models)
            started = time.monotonic()
            try:
                result = await within(self._timeout, self._workflow(run.example, handle))
                if not isinstance(result, Outcome):
                    result = Outcome(result, None)
                run.output, run.state = result.output, result.state
                run.completions = await self._llms.completions(handle)
                run.step_rewards = self._llms.step_rewards(handle)
            except TookTooLong:
                run.fail(Failure.TIMEOUT, f"the workflow took longer than {self._timeout:g} s")
            except Exception as error:  # an error in the user's code loses this run only
                run.fail(Failure.WORKFLOW, error_text(error))
            run.seconds = time.monotonic() - started
        on_done(run)


def unique(label: str) -> str:
    """Make the label unique: a killed run may have left records under the same one."""
    return f"{label}-{uuid.uuid4().hex[:8]}"


def _url_part(run: WorkflowRun) -> str:
    """Name the run for a URL. An example's id may contain characters that a path cannot."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", run.example.id)
    if plain != run.example.id:
        plain += "-" + hashlib.sha256(run.example.id.encode()).hexdigest()[:8]
    return f"{plain}-{run.generation}"


def failures(lost: Sequence[LostRun]) -> dict[str, int]:
    """Count the lost runs by reason."""
    return dict(Counter(run.reason for run in lost))


def commonest_failure(lost: Sequence[LostRun]) -> str:
    """Return the error that most of the lost runs have; empty if none was lost."""
    errors = [run.error or run.reason for run in lost]
    return max(errors, key=errors.count, default="")


def warn_of_failures(lost: Sequence[LostRun]) -> None:
    """Log each reason once, with its count and the first run it affected."""
    for reason, count in failures(lost).items():
        first = next(run for run in lost if run.reason == reason)
        logger.warning(
            "%s run%s lost (%s), the first on example `%s`: %s",
            count,
            "s were" if count > 1 else " was",
            reason,
            first.example_id,
            first.error,
        )


async def attempt(
    runner: Runner,
    examples: Sequence[Example],
    generations: int,
    label: str,
    on_done: OnDone,
    on_group: OnGroup | None = None,
) -> list[WorkflowRun]:
    """Run every example `generations` times; warn of lost runs, and return all."""
    try:
        groups = await runner.run(examples, generations, label, on_done, on_group)
    except ExceptionGroup as group:
        raise group.exceptions[0] from None  # the first error cancelled the others
    warn_of_failures(episodes.lost(groups))
    return [run for group in groups for run in group]


def record(run: WorkflowRun) -> dict[str, Any]:
    """Return a run as a row of the JSONL file in `eval.general.output_dir`."""
    return {
        "id": run.example.id,
        "generation": run.generation,
        **({} if run.group is None else {"group": run.group}),
        "output": run.output
        if isinstance(run.output, str | int | float | dict | list)
        else text_of(run.output),
        "reward": run.reward,
        "metrics": run.metrics,
        "reasons": run.reasons,
        "failure": run.failure,
        "error": run.error,
        "seconds": round(run.seconds, 3),
        "calls": len(run.completions),
    }
