"""The reward: partial credit for the format and for each correct answer."""

import re
from typing import Any

FORMAT, VALID, CORRECT = 0.2, 0.1, 0.7
_LINE = re.compile(r"^([A-E]): *(\S+?)\.?$", re.MULTILINE)


def score(run: Any) -> dict[str, float]:
    """Return the reward of a run and its parts.

    A line is valid if it answers its question with one of the puzzle's options.
    """
    options: dict[str, list[str]] = run.example.row["options"]
    expected = dict(_LINE.findall(run.example.answer))
    text = str(run.output).strip()
    given: dict[str, str] = {}
    for letter, name in _LINE.findall(text):
        if letter in options and name in options[letter]:
            given.setdefault(letter, name)
    questions = len(expected)
    correct = sum(given.get(letter) == name for letter, name in expected.items())
    exact = len(given) == questions and len(text.splitlines()) == questions and _ended(run)
    return {
        "reward": FORMAT * exact + VALID * len(given) / questions + CORRECT * correct / questions,
        "format": float(exact),
        "valid_lines": float(len(given)),
        "correct_lines": float(correct),
    }


def _ended(run: Any) -> bool:
    """Whether the model ended its answer itself instead of reaching the token limit."""
    return not run.completions or run.completions[-1].choice.get("finish_reason") == "stop"
