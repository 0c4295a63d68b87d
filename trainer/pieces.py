"""JSON of large values in pieces: a train request holds every token of a step.

One call of the encoder or the parser keeps every other thread waiting for as long as it takes.
With a call for each trajectory, made in a thread, the server goes on answering meanwhile.
"""

import json
from collections.abc import Iterator
from typing import Any

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
    """`json.loads` for a thread: with a call into Python for every object others get a turn."""
    return json.loads(text, object_hook=lambda found: found)
