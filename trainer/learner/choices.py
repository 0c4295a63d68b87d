"""Reads the token ids and logprobs of a choice that a client sends back to train on."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer import exact_tokens
from trainer.errors import BadRequest
from trainer.exact_tokens import PREFIX

Item = Mapping[str, Any]


@dataclass
class Choice:
    """The tokens of one choice, and those of its prompt if the ledger has them."""

    completion: list[int] | None
    logprobs: list[float]
    prompt: list[int] | None = None
    constrained: bool = False
    step: int | None = None


def is_choice(item: Item) -> bool:
    return "finish_reason" in item or ("message" in item and "role" not in item)


def read_choice(item: Item) -> Choice:
    """Read the ids and logprobs of a choice. Raises BadRequest for impossible ones."""
    if exact := exact_tokens.take(item):
        choice = Choice(
            exact.completion_ids, exact.logprobs, exact.prompt_ids, exact.constrained, exact.step
        )
    else:
        tokens = _tokens(item)
        logprobs = [_logprob(token) for token in tokens]
        choice = Choice(_token_ids(tokens), logprobs)
    tokens_found = len(choice.completion or [])
    if choice.completion is not None and choice.logprobs and tokens_found != len(choice.logprobs):
        raise BadRequest(
            f"A choice has `{tokens_found}` tokens and `{len(choice.logprobs)}` logprobs",
            hint="Send choices as the server returned them",
        )
    if not all(map(math.isfinite, choice.logprobs)) or max(choice.logprobs, default=0.0) > 1e-3:
        raise _wrong_logprob(
            next(it for it in choice.logprobs if not math.isfinite(it) or it > 1e-3)
        )
    return choice


def _tokens(item: Item) -> list[Item]:
    """The tokens in a choice's logprobs."""
    found = item.get("logprobs") or {}
    try:
        tokens = [*(found.get("content") or []), *(found.get("refusal") or [])]
    except (AttributeError, TypeError):
        tokens = [None]
    if not all(isinstance(token, Mapping) for token in tokens):
        raise BadRequest(
            "A choice has logprobs that are not a list of objects in `content`",
            hint="Send choices as the server returned them",
        )
    return tokens


def _logprob(token: Item) -> float:
    logprob = token.get("logprob")
    if not isinstance(logprob, int | float) or abs(logprob) > 1e308:  # an int may be any size
        raise _wrong_logprob(logprob)
    return float(logprob)


def _wrong_logprob(logprob: object) -> BadRequest:
    return BadRequest(
        f"A choice has the logprob `{str(logprob)[:40]}`",
        hint="Send logprobs as the server returned them: finite and not above zero",
    )


def _token_ids(tokens: Sequence[Item]) -> list[int] | None:
    names = [str(token.get("token", "")) for token in tokens]
    if not names or not all(name.startswith(PREFIX) for name in names):
        return None
    try:
        return [int(name[len(PREFIX) :]) for name in names]
    except ValueError as exc:
        raise BadRequest(
            f"A logprob's token is not an id: {exc}",
            hint="Send `token_id:N`, or the token's text",
        ) from exc
