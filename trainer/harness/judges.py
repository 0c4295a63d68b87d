"""Evaluators that ask another LLM: a score of its own, or a ranking of a group (ART's RULER)."""

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

# A number at the start, not one of a sentence, a list, a fraction or of `8 out of 10`.
_GRADE = re.compile(
    r"\W*(?:score\W*)?(?<![-.\d])(-?\d*\.\d+|-?\d+(?![.)]\s+\w))(?![.,]?\d|\s*(?:/|%|out of))",
    re.IGNORECASE,
)


class LlmJudge:
    """Asks for a score between 0 and 1, run by run."""

    def __init__(self, llms: Llms, config: configs.LlmJudge) -> None:
        self._llms = llms
        self._config = config

    async def score(self, runs: Sequence[WorkflowRun]) -> list[Any]:
        return list(await asyncio.gather(*map(self._one, runs), return_exceptions=True))

    async def _one(self, run: WorkflowRun) -> float:
        expected = f"\n\nExpected answer:\n{run.example.answer}" if run.example.answer else ""
        prompt = (
            f"{self._config.instructions}\n\nTask:\n{run.example.question}{expected}\n\n"
            f"Answer:\n{run.output}\n\n"
            "Reply with a number between 0 (worst) and 1 (best), and nothing else."
        )
        text = await _judge(self._llms, self._config.llm).ask(prompt)
        found = _GRADE.match(_said(text))
        if not found or not 0 <= float(found[1]) <= 1:
            raise JudgeUnclear(f"The judge answered `{text[:60]}`, not a number from 0 to 1")
        return float(found[1])


class Ruler:
    """Asks for scores of all runs of an example, relative to each other.

    Only the order within a group matters to GRPO, and comparing is easier than grading.
    """

    def __init__(self, llms: Llms, config: configs.Ruler) -> None:
        self._llms = llms
        self._config = config

    async def score(self, runs: Sequence[WorkflowRun]) -> list[Any]:
        attempts = "\n\n".join(
            f'<attempt id="{number}">\n{_story(run)}\n</attempt>'
            for number, run in enumerate(runs, 1)
        )
        prompt = (
            f"{self._config.instructions}\n\nTask:\n{runs[0].example.question}\n\n"
            f"{len(runs)} attempts at it follow. Compare them, and give each a score between 0 and "
            f"1; better attempts get higher scores.\n\n{attempts}\n\n"
            f"Reply with a JSON list of {len(runs)} numbers, in the order of the attempts, and "
            "nothing else."
        )
        text = await _judge(self._llms, self._config.llm).ask(prompt)
        return _scores(text, len(runs))


def _said(text: str) -> str:
    """The answer without the thoughts before it."""
    return text.rpartition("</think>")[2]


def _story(run: WorkflowRun) -> str:
    """What happened in a run: the answers of its LLM, then its output."""
    said = [completion.text for completion in run.completions]
    return "\n".join([*said, f"Output: {run.output}"])


def _scores(text: str, count: int) -> list[float]:
    found = re.search(r"\[[^\[\]]*\]", _said(text))
    try:
        scores = [float(score) for score in json.loads(found[0])] if found else []
    except (ValueError, TypeError):
        scores = []
    if len(scores) != count or not all(0 <= score <= 1 for score in scores):
        raise JudgeUnclear(f"The judge answered `{text[:60]}`, not {count} numbers from 0 to 1")
    return scores


def _judge(llms: Llms, name: str) -> Any:
    return llms.handle(f"judge-{uuid.uuid4().hex}", name)
