"""What every driver asks for, so that the frameworks can be compared.

A driver has a function per column. It gets `url` (a base URL that ends in `/v1`) and `model`, and
returns what the framework gave it; `run.py` checks that. Columns without a function are absent.
"""

import json
from typing import Any

import pydantic

# The script in `matrix.py` answers these questions; answers to others are sampled.
HELLO = "Say hello."
SUM = "What is 2 + 3?"
CALL_IT = "Call the tool."
DESCRIBE = "Describe a number."
INTRODUCTION = "I am Ada."
WHO = "What is my name?"
KEY = "any"

calls: list[list[int]] = []


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    calls.append([a, b])
    return a + b


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "description": "Add two numbers.", "parameters": SCHEMA},
}
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "add"}}


class Number(pydantic.BaseModel):
    """A number."""

    value: int
    even: bool


NUMBER_FORMAT: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {
        "name": "Number",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"value": {"type": "integer"}, "even": {"type": "boolean"}},
            "required": ["value", "even"],
            "additionalProperties": False,
        },
    },
}


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def arguments_of(call: Any) -> dict[str, Any]:
    """The arguments of an OpenAI tool call."""
    return dict(json.loads(call.function.arguments))
