"""Encode and parse large JSON values without blocking other threads for long.

A train request holds every token of a step. One call of the encoder or the parser blocks all
other threads until it returns. A separate call for each trajectory, made in a thread, lets the
server keep answering.
"""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

FAST_PARSE_LIMIT = 16 << 20  # bytes; parsing them blocks other threads for about 0.1 s
_DEPTH = 5  # a request, its groups, a group, its trajectories, a trajectory


def encode_in_pieces(value: Any, *, depth: int = _DEPTH) -> Iterator[str]:
    """Yield the text of `json.dumps(value)`, split at the objects of the outer `depth` levels."""
    if depth and isinstance(value, dict):
        yield "{"
        for index, key in enumerate(value):
            yield f"{', ' if index else ''}{json.dumps(key)}: "
            yield from encode_in_pieces(value[key], depth=depth - 1)
        yield "}"
    elif depth and isinstance(value, list) and value and isinstance(value[0], dict):
        yield "["
        for index, item in enumerate(value):
            yield ", " if index else ""
            yield from encode_in_pieces(item, depth=depth - 1)
        yield "]"
    else:
        yield json.dumps(value)


def parse(text: bytes, *, limit: int | None = FAST_PARSE_LIMIT) -> Any:
    """Parse JSON as `json.loads` does. Call it in a thread.

    Texts up to `limit` bytes use pydantic's parser, which takes less than half the time but blocks
    other threads. Longer texts use `json.loads` with a Python hook for every object, which gives
    other threads a turn.
    """
    if limit is None or len(text) <= limit:
        with contextlib.suppress(ValueError):  # it rejects lone surrogates and deep nesting
            return from_json(text, cache_strings="keys")
    return json.loads(text, object_hook=lambda parsed: parsed)
