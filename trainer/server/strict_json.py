"""The one reader of JSON bodies. It is stricter than Python's parser, and as fast on large bodies.

Python reads `NaN`, integers that no float can hold, and halves of surrogate pairs, as a cut emoji
leaves them. Answers and files cannot hold these: they echo parts of a request, and are UTF-8.
"""

import contextlib
import json
import math
import re
from typing import Any

from pydantic_core import from_json

from trainer.processes.large_json import FAST_PARSE_LIMIT

MAX_DIGITS = 308
"""Digits of an integer; a longer one may not fit a float."""
BLOCKING = 1 << 20  # bytes that are parsed without giving other threads a turn
_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_LONG = b"0" * (MAX_DIGITS + 1)
_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")


def read(body: bytes) -> Any:
    """Parse a body. Raises JSONDecodeError for all that is not JSON."""
    hooks: dict[str, Any] = {"parse_constant": _refuse, "parse_float": _finite}
    if len(body) > BLOCKING:
        hooks["object_hook"] = _take_turns
    return _read(body, hooks=hooks)


def read_large(body: bytes) -> Any:
    """Parse the trajectories of a step. Call it in a thread.

    `NaN` is accepted, because ART's older clients send it as the logprob of a token that has none.
    """
    if not _has_long_number(body) and not _has_half_character(body):
        with contextlib.suppress(ValueError, RecursionError):  # the other parser words the fault
            if len(body) <= FAST_PARSE_LIMIT:
                return from_json(body, cache_strings="keys")
            return json.loads(body.decode(), object_hook=_take_turns)
    return _read(body, hooks={"object_hook": _take_turns})


def _take_turns(parsed: Any) -> Any:
    """Return an object as it is. Calling Python gives other threads a turn."""
    return parsed


def _read(body: bytes, *, hooks: dict[str, Any]) -> Any:
    try:
        text = body.decode(json.detect_encoding(body))
        value = json.loads(text, parse_int=_bounded, **hooks)
        if "\\ud" in text.lower():  # the only way to write half of a pair
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start].encode("unicode_escape").decode()
        fault = f"a text contains half of a character, `{half}`; cut texts only between characters"
        raise json.JSONDecodeError(fault, "", 0) from error
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError("it is nested too deeply", "", 0) from None
    except ValueError as error:
        raise json.JSONDecodeError(str(error), "", 0) from error
    return value


def _has_long_number(body: bytes) -> bool:
    """Whether a number may have too many digits; they may also be part of a text."""
    return _LONG in body.translate(_ZEROS)


def _has_half_character(body: bytes) -> bool:
    if b"\\ud" not in body and b"\\uD" not in body:
        return False
    # Two backslashes are one character of a text, which escapes nothing.
    return _HALF.search(_PAIR.sub(b"_", body.replace(rb"\\", b"_"))) is not None


def _refuse(constant: str) -> float:
    raise ValueError(f"`{constant}` is not a JSON number")


def _finite(digits: str) -> float:
    return number if math.isfinite(number := float(digits)) else _refuse(digits[:40])


def _bounded(digits: str) -> int:
    if len(digits.lstrip("-")) > MAX_DIGITS:
        raise ValueError(f"`{digits[:10]}…`, an integer of {len(digits)} digits, is too large")
    return int(digits)
