"""The exact tokens of a sampled choice, as they travel in its `art` from the ledger to the learner.

Numbers go as arrays in base64: a step has hundreds of thousands, and written out as JSON they took
longer than everything else that happens to a train request.
"""

import binascii
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import Buffer

from trainer.errors import BadRequest

FIELD = "art"
PREFIX = "token_id:"  # of a token that is named by its id, in logprobs
_TYPES = {"prompt_ids": "i", "completion_ids": "i", "logprobs": "d"}


@dataclass(frozen=True)
class ExactTokens:
    """What one choice was sampled from, as and with."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]

    def put(self, choice: dict[str, Any]) -> None:
        """Write the tokens into `choice`, in place of its logprobs."""
        put(choice, *(array(kind, getattr(self, name)) for name, kind in _TYPES.items()))


def put(choice: dict[str, Any], *arrays: Buffer) -> None:
    """Write a choice's prompt, its completion and its logprobs into it."""
    choice.pop("logprobs", None)
    choice[FIELD] = {
        name: binascii.b2a_base64(numbers, newline=False).decode()
        for name, numbers in zip(_TYPES, arrays, strict=True)
    }


def take(choice: Mapping[str, Any]) -> ExactTokens | None:
    """The tokens that `put` wrote into a choice, or None."""
    found = choice.get(FIELD)
    if not found:
        return None
    try:
        return ExactTokens(**{name: _read(kind, found[name]) for name, kind in _TYPES.items()})
    except (KeyError, TypeError, ValueError) as exc:  # binascii's error is a ValueError
        raise BadRequest(
            f"A choice has an `{FIELD}` that cannot be read: {exc!r}",
            hint="Send choices as the server returned them",
        ) from exc


def _read(kind: str, text: str) -> list[Any]:
    numbers = array(kind)
    numbers.frombytes(binascii.a2b_base64(text))
    return numbers.tolist()
