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
_KEY = re.compile(r'"score"\s*:', re.IGNORECASE)
Verdict = float | dict[str, Any]
"""A score, with the judge's reason if it gives one."""


class LlmJudge:
    """Requests a score between 0 and 1 for each run, and a sentence that says why."""

    def __init__(self, llms: Llms, config: configs.LlmJudgeConfig) -> None:
        self._llms = llms
        self._config = config

    async def score(self, runs: Sequence[WorkflowRun]) -> list[Any]:
        return list(await asyncio.gather(*map(self._score_run, runs), return_exceptions=True))

    async def _score_run(self, run: WorkflowRun) -> Verdict:
        expected = f"\n\nExpected answer:\n{run.example.answer}" if run.example.answer else ""
        prompt = (
            f"{self._config.instructions}\n\nTask:\n{run.example.question}{expected}\n\n"
            f"Answer:\n{run.output}\n\n"
            'Reply with JSON such as {"reason": "one sentence", "score": 0.7}, where the score is '
            "between 0 (worst) and 1 (best), and with nothing else."
        )
        reply = await _ask(self._llms, self._config.llm, prompt)
        try:
            return _read_verdict(_without_thoughts(reply))
        except (ValueError, TypeError, LookupError, RecursionError):
            raise JudgeUnclear(
                f"The judge replied `{reply[:60]}`, not a score from 0 to 1"
            ) from None


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
            f"Reply with a JSON list of {len(runs)} objects in the order of the attempts, such as "
            '[{"reason": "one sentence", "score": 0.7}, …], and nothing else.'
        )
        reply = await _ask(self._llms, self._config.llm, prompt)
        try:
            verdicts = _read_verdicts(_without_thoughts(reply))
        except (ValueError, TypeError, LookupError, RecursionError):
            verdicts = []
        if len(verdicts) != len(runs):
            raise JudgeUnclear(
                f"The judge replied `{reply[:60]}`, not {len(runs)} scores from 0 to 1"
            )
        return list(verdicts)


def _without_thoughts(reply: str) -> str:
    """Return the reply after its thinking part."""
    return reply.rpartition("</think>")[2]


def _transcript(run: WorkflowRun) -> str:
    """Return the completions of a run, then its output."""
    completions = [completion.text for completion in run.completions]
    return "\n".join([*completions, f"Output: {run.output}"])


def _read_verdict(reply: str) -> Verdict:
    """One score with its reason, or a number alone. Raises ValueError and others."""
    if _KEY.search(reply):
        return _verdict(_only_json(reply))
    match = _SCORE.match(reply)
    return _verdict(match[1] if match else None)


def _read_verdicts(reply: str) -> list[Verdict]:
    """A list of them."""
    if _KEY.search(reply):
        found = _only_json(reply)
        if isinstance(found, dict):  # some judges can only reply with an object
            (found,) = (value for value in found.values() if isinstance(value, list))
    else:
        match = re.search(r"\[[^\[\]]*\]", reply)
        found = json.loads(match[0]) if match else []
    return [_verdict(item) for item in found]


def _only_json(reply: str) -> Any:
    """The one object, or list of objects, in a reply.

    With a second one it is unclear which is meant: a judge may quote the answer, and a model in
    training would learn to write scores. For the same reason no part of damaged JSON is used.
    """
    start = re.search(r"\{|\[\s*\{", reply)
    if start is None:
        raise ValueError("no JSON")
    value, end = json.JSONDecoder(strict=False).raw_decode(reply, start.start())
    if "{" in reply[end:]:
        raise ValueError("more than one JSON value")
    return value


def _verdict(item: Any) -> Verdict:
    given = {"score": item}
    if isinstance(item, dict):
        given = {key.lower(): value for key, value in item.items()}
    score, reason = given["score"], given.get("reason")
    if isinstance(score, bool) or not 0 <= float(score) <= 1:
        raise ValueError("not a score from 0 to 1")
    if not isinstance(reason, str) or not reason.strip():
        return float(score)
    return {"reward": float(score), "reason": reason}


async def _ask(llms: Llms, name: str, prompt: str) -> str:
    # A verdict is never trained on, and reasoning models refuse requests with `logprobs`.
    judge = llms.handle(f"judge-{uuid.uuid4().hex}", name)
    return await judge.ask(prompt, logprobs=None)
