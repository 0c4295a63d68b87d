"""JSON of large values in pieces: a train request holds every token of a step.

One call of the encoder or the parser keeps every other thread waiting for as long as it takes.
With a call for each trajectory, made in a thread, the server goes on answering meanwhile.
"""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

AT_ONCE = 16 << 20  # bytes, read in about a tenth of a second while others wait
_DEPTH = 6  # a call, its parameters, groups, a group, its trajectories, a trajectory


def pieces(value: Any, *, depth: int = _DEPTH) -> Iterator[str]:
    """The text of `json.dumps(value)`, an object at a time below the outermost levels."""
    if depth and isinstance(value, dict):
        yield "{"
        for place, key in enumerate(value):
            yield f"{', ' if place else ''}{json.dumps(key)}: "
            yield from pieces(value[key], depth=depth - 1)
        yield "}"
    elif depth and is_large(value):
        yield "["
        for place, item in enumerate(value):
            yield ", " if place else ""
            yield from pieces(item, depth=depth - 1)
        yield "]"
    else:
        yield json.dumps(value)


def is_large(value: Any) -> bool:
    """Whether a value may be worth pieces: a list of objects, rather than of numbers."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def parse(text: bytes) -> Any:
    """`json.loads` for a thread.

    A parser in less than half the time reads what is at most `AT_ONCE`; of more, a call into
    Python for every object gives others a turn.
    """
    if len(text) <= AT_ONCE:
        with contextlib.suppress(ValueError):  # it refuses half a surrogate, and deep nesting
            return from_json(text, cache_strings="keys")
    return json.loads(text, object_hook=lambda found: found)
