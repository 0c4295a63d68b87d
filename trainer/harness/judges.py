"""Evaluators that use another LLM: a score for each run, or a comparison of a group (RULER)."""

import asyncio
import json
import re
import uuid
from collections.abc import Sequence
from typing import Any

from trainer.errors import JudgeUnclear
from trainer.harness import components as configs
from trainer.harness.llm import Llms
from trainer.harness.types import WorkflowRun

# A number at the start of the reply, but not in a sentence, a list, `8/10` or `8 out of 10`.
_SCORE = re.compile(
    r"\W*(?:score\W*)?(?<![-.\d])(-?\d*\.\d+|-?\d+(?![.)]\s+\w))(?![.,]?\d|\s*(?:/|%|out of))",
    re.IGNORECASE,
)


class LlmJudge:
    """Requests a score between 0 and 1 for each run."""

    def __init__(self, llms: Llms, config: configs.LlmJudgeConfig) -> None:
        self._llms = llms
        self._config = config

    async def score(self, runs: Sequence[WorkflowRun]) -> list[Any]:
        return list(await asyncio.gather(*map(self._score_run, runs), return_exceptions=True))

    async def _score_run(self, run: WorkflowRun) -> float:
        expected = f"\n\nExpected answer:\n{run.example.answer}" if run.example.answer else ""
        prompt = (
            f"{self._config.instructions}\n\nTask:\n{run.example.question}{expected}\n\n"
            f"Answer:\n{run.output}\n\n"
            "Reply with a number between 0 (worst) and 1 (best), and nothing else."
        )
        reply = await _judge(self._llms, self._config.llm).ask(prompt)
        match = _SCORE.match(_without_thoughts(reply))
        if not match or not 0 <= float(match[1]) <= 1:
            raise JudgeUnclear(f"The judge replied `{reply[:60]}`, not a number from 0 to 1")
        return float(match[1])


class Ruler:
    """Requests scores for all runs of an example at once, relative to each other.

    GRPO only needs to know which run of a group is better, and comparing is easier than grading.
    """

    def __init__(self, llms: Llms, config: configs.RulerConfig) -> None:
        self._llms = llms
        self._config = config

    async def score(self, runs: Sequence[WorkflowRun]) -> list[Any]:
        attempts = "\n\n".join(
            f'<attempt id="{number}">\n{_transcript(run)}\n</attempt>'
            for number, run in enumerate(runs, 1)
        )
        prompt = (
            f"{self._config.instructions}\n\nTask:\n{runs[0].example.question}\n\n"
            f"{len(runs)} attempts at it follow. Compare them, and give each a score between 0 and "
            f"1; better attempts get higher scores.\n\n{attempts}\n\n"
            f"Reply with a JSON list of {len(runs)} numbers, in the order of the attempts, and "
            "nothing else."
        )
        reply = await _judge(self._llms, self._config.llm).ask(prompt)
        return _parse_scores(reply, len(runs))


def _without_thoughts(reply: str) -> str:
    """Return the reply after its thinking part."""
    return reply.rpartition("</think>")[2]


def _transcript(run: WorkflowRun) -> str:
    """Return the completions of a run, then its output."""
    completions = [completion.text for completion in run.completions]
    return "\n".join([*completions, f"Output: {run.output}"])


def _parse_scores(reply: str, count: int) -> list[float]:
    match = re.search(r"\[[^\[\]]*\]", _without_thoughts(reply))
    try:
        scores = [float(score) for score in json.loads(match[0])] if match else []
    except (ValueError, TypeError):
        scores = []
    if len(scores) != count or not all(0 <= score <= 1 for score in scores):
        raise JudgeUnclear(f"The judge replied `{reply[:60]}`, not {count} numbers from 0 to 1")
    return scores


def _judge(llms: Llms, name: str) -> Any:
    return llms.handle(f"judge-{uuid.uuid4().hex}", name)
