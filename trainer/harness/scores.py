"""Reads the scores that evaluators return, which may be any object of the user's code."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.errors import BadScore
from trainer.harness.types import WorkflowRun
from trainer.harness.user_texts import error_text, text_of
from trainer.harness.watchdog import users_code
from trainer.rewards import LIMIT

logger = logging.getLogger(__name__)
LONGEST_REASON = 2000
"""Characters of a reason that are kept, because it travels with its trajectory."""
_warned: set[tuple[str, str]] = set()


@dataclass
class Score:
    """An evaluator's judgement of one run."""

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    """Texts by the evaluator's name, or by `NAME/KEY` if the evaluator calls one otherwise."""


def parse_score(score: Any, name: str, run: WorkflowRun) -> Score:
    """Split an evaluator's result into reward, metrics and reasons, or raise `BadScore`."""
    where = f"Evaluator `{name}` on example `{run.example.id}`"
    if isinstance(score, Score):
        return score
    if isinstance(score, BadScore):
        raise score
    if isinstance(score, BaseException):
        raise BadScore(f"{where} raised {error_text(score)}") from score
    try:
        found = Score(0.0)
        reward = score
        with users_code():
            if isinstance(score, Mapping):
                for key, value in score.items():
                    _add(found, name, text_of(key), value)
                reward = score.get("reward")
            number = _number(reward)
    except BaseException as error:  # of the object's own code
        raise BadScore(f"{where} returned a score that raised {error_text(error)}") from error
    if number is None:
        raise BadScore(f"{where} returned `{_shown(reward)}`, not a finite number")
    found.reward = number
    return found


def expected_answer(run: WorkflowRun, evaluator: str) -> str:
    """Return the example's answer as text, or raise `BadScore` if there is none.

    An empty text is part of every output, so comparing with it would reward anything.
    """
    answer = run.example.answer
    text = "" if answer is None else str(answer)
    if not text.strip():
        raise BadScore(
            f"Example `{run.example.id}` has no answer, which the evaluator `{evaluator}` needs",
            hint="Add an answer, or check `eval.general.dataset.structure.answer_key`",
        )
    return text


def _add(found: Score, name: str, key: str, value: Any) -> None:
    """Keep one entry of a dict: a number is a metric, a text is a reason, None is absent."""
    if key == "reward" or value is None:
        return
    if isinstance(value, str):
        if reason := reason_text(value):
            found.reasons[name if key == "reason" else f"{name}/{key}"] = reason
    elif (number := _number(value)) is not None:
        found.metrics[key] = number
    elif (name, key) not in _warned:
        _warned.add((name, key))
        logger.warning(
            "Evaluator `%s` returns `%s`, which is left out: `%s` is neither a number up to %g nor "
            "a text",
            *(name, key, _shown(value), LIMIT),
        )


def reason_text(text: str) -> str:
    """A reason as valid text of bounded length."""
    text = text_of(text).strip()
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]} …"


def _number(value: Any) -> float | None:
    """The number that a value stands for; None if that is none a reward may be."""
    # Scalars of numpy and torch have `item`. A bool counts as 0 or 1.
    try:
        value = value.item() if hasattr(value, "item") else value
    except (TypeError, ValueError, RuntimeError):  # an array with several values
        return None
    return float(value) if isinstance(value, int | float) and abs(value) <= LIMIT else None


def _shown(value: Any) -> str:
    if isinstance(value, int):
        return f"{float(value):g}" if value.bit_length() < 1000 else "a huge integer"
    return text_of(_Repr(value))[:60]


class _Repr:
    """Prints as the `repr` of a value."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __str__(self) -> str:
        return repr(self._value)
