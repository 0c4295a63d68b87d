"""Runs the workflow on examples concurrently, each run with a time limit, and scores them."""

import asyncio
import hashlib
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from kit.errors import ConfigError
from trainer.errors import RunFailed
from trainer.harness.evaluators import Scorer
from trainer.harness.llm import Llms, Workflow
from trainer.harness.types import Example, Failure, Outcome, WorkflowRun

logger = logging.getLogger(__name__)
OnDone = Callable[[WorkflowRun], None]


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
        self, examples: Sequence[Example], generations: int, label: str, on_done: OnDone
    ) -> list[list[WorkflowRun]]:
        """Run every example `generations` times. The runs of one example form a group."""
        # Make the label unique: a killed run may have left records under the same one.
        label = f"{label}-{uuid.uuid4().hex[:8]}"
        async with asyncio.TaskGroup() as tasks:
            groups = [
                tasks.create_task(self._group(example, generations, label, on_done))
                for example in examples
            ]
        return [group.result() for group in groups]

    async def _group(
        self, example: Example, generations: int, label: str, on_done: OnDone
    ) -> list[WorkflowRun]:
        runs = [WorkflowRun(example, generation) for generation in range(generations)]
        await asyncio.gather(
            *(self._run_once(run, f"{label}-{_url_part(run)}", on_done) for run in runs)
        )
        await self._scorer.score(runs)
        for run in runs:
            if run.failure is not None:
                logger.debug("%s: %s", run.failure, run.error)
                if self._stop_on_failure:
                    raise RunFailed(f"A run on example `{example.id}` failed: {run.error}")
        return runs

    async def _run_once(self, run: WorkflowRun, rollout: str, on_done: OnDone) -> None:
        async with self._slots:
            handle = self._llms.handle(rollout, self._llm)
            started = time.monotonic()
            timeout = asyncio.timeout(self._timeout)
            try:
                async with timeout:
                    result = await self._workflow(run.example, handle)
                if not isinstance(result, Outcome):
                    result = Outcome(result, None)
                run.output, run.state = result.output, result.state
                run.completions = await self._llms.completions(handle)
                run.step_rewards = self._llms.step_rewards(handle)
            except Exception as error:  # an error in the user's code loses this run only
                if timeout.expired():
                    run.fail(Failure.TIMEOUT, f"the workflow took longer than {self._timeout:g} s")
                else:
                    run.fail(Failure.WORKFLOW, _one_line(error))
            run.seconds = time.monotonic() - started
        on_done(run)


def _url_part(run: WorkflowRun) -> str:
    """Name the run for a URL. An example's id may contain characters that a path cannot."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", run.example.id)
    if plain != run.example.id:
        plain += "-" + hashlib.sha256(run.example.id.encode()).hexdigest()[:8]
    return f"{plain}-{run.generation}"


def _one_line(error: BaseException) -> str:
    text = getattr(error, "message", None) or f"{type(error).__name__}: {error}"
    return " ".join(str(text).split())[:300]


def failures(runs: Sequence[Sequence[WorkflowRun]]) -> dict[str, int]:
    """Count the lost runs by reason."""
    counts: dict[str, int] = {}
    for group in runs:
        for run in group:
            if run.failure is not None:
                counts[run.failure.value] = counts.get(run.failure.value, 0) + 1
    return counts


def warn_of_failures(runs: Sequence[Sequence[WorkflowRun]]) -> None:
    """Log each reason once, with its count and the first run it affected."""
    for reason, count in failures(runs).items():
        first = next(run for group in runs for run in group if run.failure == reason)
        logger.warning(
            "%s run%s lost (%s), the first on example `%s`: %s",
            count,
            "s were" if count > 1 else " was",
            reason,
            first.example.id,
            first.error,
        )


def record(run: WorkflowRun) -> dict[str, Any]:
    """Return a run as a row of the JSONL file in `eval.general.output_dir`."""
    return {
        "id": run.example.id,
        "generation": run.generation,
        "output": run.output
        if isinstance(run.output, str | int | float | dict | list)
        else str(run.output),
        "reward": run.reward,
        "metrics": run.metrics,
        "failure": run.failure,
        "error": run.error,
        "seconds": round(run.seconds, 3),
        "calls": len(run.completions),
    }
