"""The id of a sampled choice, and its exact tokens, which a field carries from ledger to learner.

Every choice that the server samples has an unguessable id. Answers carry it twice: as `choice_id`
of the choice, which OpenAI's and ART's objects keep, and of its first token in the logprobs, which
also survives where a framework builds a new choice around the same logprobs.

Numbers are arrays in base64. A step has hundreds of thousands of them; as JSON numbers they took
longer than everything else in a train request.
"""

import binascii
import secrets
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import Buffer

from trainer.errors import BadRequest

FIELD = "art"
CHOICE_ID = "choice_id"  # the extra field of a choice, and of its first logprob, that holds its id
PREFIX = "token_id:"  # marks a token in logprobs that is given by its id
IMPOSSIBLE = -9999.0  # the logprob of a token that the policy rules out, as vLLM writes it
_TYPES = {"prompt_ids": "i", "completion_ids": "i", "logprobs": "d"}


def new_choice_id() -> str:
    """A random id for a choice; nobody can guess that of another conversation."""
    return secrets.token_hex(16)


def choice_id(choice: Mapping[str, Any]) -> str | None:
    """The id that the server gave to a choice, or None if a framework lost it."""
    found = choice.get(CHOICE_ID)
    if found is None:
        logprobs = choice.get("logprobs")
        content = logprobs.get("content") if isinstance(logprobs, Mapping) else None
        first = content[0] if isinstance(content, list) and content else None
        found = first.get(CHOICE_ID) if isinstance(first, Mapping) else None
    return found if isinstance(found, str) and found else None


@dataclass(frozen=True)
class ExactTokens:
    """The prompt, token ids and logprobs of one sampled choice."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    constrained: bool = False
    """Whether the request limited the text, e.g. to a JSON schema."""
    step: int | None = None
    """The step of the trained model that sampled it; None for other weights."""

    def put(self, choice: dict[str, Any]) -> None:
        """Write the tokens into `choice`, replacing its logprobs."""
        arrays = (array(kind, getattr(self, name)) for name, kind in _TYPES.items())
        put(choice, *arrays, constrained=self.constrained, step=self.step)


def put(
    choice: dict[str, Any],
    *arrays: Buffer,
    constrained: bool = False,
    step: int | None = None,
    id: str | None = None,
) -> None:
    """Write the arrays of prompt ids, completion ids and logprobs into a choice, and its `id`."""
    choice.pop("logprobs", None)
    if id:
        choice[CHOICE_ID] = id  # it may have been in the logprobs only
    choice[FIELD] = {
        name: binascii.b2a_base64(numbers, newline=False).decode()
        for name, numbers in zip(_TYPES, arrays, strict=True)
    }
    if constrained:
        choice[FIELD]["constrained"] = True
    if step is not None:
        choice[FIELD]["step"] = step


def mark_ambiguous(choice: dict[str, Any]) -> None:
    """Mark a choice that could have been sampled from several prompts."""
    choice[FIELD] = {"ambiguous": True}


def is_ambiguous(choice: Mapping[str, Any]) -> bool:
    fields = choice.get(FIELD)
    return isinstance(fields, Mapping) and fields.get("ambiguous") is True


def take(choice: Mapping[str, Any]) -> ExactTokens | None:
    """Return the tokens that `put` wrote into a choice, or None."""
    fields = choice.get(FIELD)
    if not fields or is_ambiguous(choice):
        return None
    try:
        arrays = {name: _read(kind, fields[name]) for name, kind in _TYPES.items()}
        step = int(fields["step"]) if "step" in fields else None
        return ExactTokens(**arrays, constrained=bool(fields.get("constrained")), step=step)
    except (KeyError, TypeError, ValueError) as exc:  # binascii's error is a ValueError
        raise BadRequest(
            f"A choice has an invalid `{FIELD}`: {exc!r}",
            hint="Send choices unchanged, as the server returned them",
        ) from exc


def _read(kind: str, text: str) -> list[Any]:
    numbers = array(kind)
    numbers.frombytes(binascii.a2b_base64(text))
    return numbers.tolist()
