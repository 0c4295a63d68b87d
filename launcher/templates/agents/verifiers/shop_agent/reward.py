"""The parts of the reward of one run, each 0 or 1. Partial marks let a small model learn."""

import json
from typing import Any

from shop_agent.tools import price, stock

TOOLS = {"price": price, "stock": stock}


def tool(completion: Any, info: Any) -> float:
    """Whether the right tool was called."""
    return float(first_call(completion)[0] == info["tool"])


def item(completion: Any, info: Any) -> float:
    """Whether its argument names the right item."""
    return float(info["item"] in first_call(completion)[1].lower())


def right(completion: Any, answer: str) -> float:
    """Whether the tool returns the right number."""
    name, argument = first_call(completion)
    return float(name in TOOLS and TOOLS[name](argument) == answer)


def first_call(completion: Any) -> tuple[str, str]:
    """The name and the argument of the tool that the model called; empty if none."""
    for call in completion[-1].get("tool_calls") or []:
        return call["name"], str(json.loads(call["arguments"]).get("item", ""))
    return "", ""
