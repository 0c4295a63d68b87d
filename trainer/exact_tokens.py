"""The exact tokens of a sampled choice, which its field `art` carries from ledger to learner.

Numbers are arrays in base64. A step has hundreds of thousands of them; as JSON numbers they took
longer than everything else in a train request.
"""

import binascii
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import Buffer

from trainer.errors import BadRequest

FIELD = "art"
PREFIX = "token_id:"  # marks a token in logprobs that is given by its id
_TYPES = {"prompt_ids": "i", "completion_ids": "i", "logprobs": "d"}


@dataclass(frozen=True)
class ExactTokens:
    """The prompt, token ids and logprobs of one sampled choice."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]

    def put(self, choice: dict[str, Any]) -> None:
        """Write the tokens into `choice`, replacing its logprobs."""
        put(choice, *(array(kind, getattr(self, name)) for name, kind in _TYPES.items()))


def put(choice: dict[str, Any], *arrays: Buffer) -> None:
    """Write the arrays of prompt ids, completion ids and logprobs into a choice."""
    choice.pop("logprobs", None)
    choice[FIELD] = {
        name: binascii.b2a_base64(numbers, newline=False).decode()
        for name, numbers in zip(_TYPES, arrays, strict=True)
    }


def take(choice: Mapping[str, Any]) -> ExactTokens | None:
    """Return the tokens that `put` wrote into a choice, or None."""
    fields = choice.get(FIELD)
    if not fields:
        return None
    try:
        return ExactTokens(**{name: _read(kind, fields[name]) for name, kind in _TYPES.items()})
    except (KeyError, TypeError, ValueError) as exc:  # binascii's error is a ValueError
        raise BadRequest(
            f"A choice has an invalid `{FIELD}`: {exc!r}",
            hint="Send choices unchanged, as the server returned them",
        ) from exc


def _read(kind: str, text: str) -> list[Any]:
    numbers = array(kind)
    numbers.frombytes(binascii.a2b_base64(text))
    return numbers.tolist()
