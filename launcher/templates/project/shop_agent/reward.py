"""The reward of one run, from 0 to 1. Partial marks let a small model learn from its first try."""

import json
from typing import Any


def score(run: Any) -> dict[str, float]:
    """Mark the call that the agent made, and its answer."""
    called, argument = first_call(run)
    expected = run.example.row
    tool = float(called == expected["tool"])
    item = float(expected["item"] in argument.lower())
    right = float(str(run.output).strip() == expected["answer"])
    return {
        "reward": 0.3 * tool + 0.3 * item + 0.4 * right,
        "tool": tool,
        "item": item,
        "right": right,
    }


def first_call(run: Any) -> tuple[str, str]:
    """The name and the argument of the first tool that the model called; empty if none."""
    for completion in run.completions:
        for call in completion.choice["message"].get("tool_calls") or []:
            arguments = json.loads(call["function"]["arguments"])
            return call["function"]["name"], str(arguments.get("item", ""))
    return "", ""
