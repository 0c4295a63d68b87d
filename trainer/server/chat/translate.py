"""Functions that the translations of other APIs to a chat share."""

from collections.abc import Set
from typing import Any

import pydantic
from fastapi.exceptions import RequestValidationError

from kit.types import Json
from trainer.errors import Unsupported
from trainer.exact_tokens import CHOICE_ID
from trainer.server.chat.request import ChatRequest

# Settings of a chat that other APIs lack. Clients send them as extra fields, for example `seed` in
# the `extra_body` of OpenAI's package.
SAMPLING = {
    *("chat_template_kwargs", "frequency_penalty", "ignore_eos", "logit_bias", "min_p"),
    *("min_tokens", "presence_penalty", "repetition_penalty", "seed", "skip_special_tokens"),
    *("stop", "stop_token_ids", "structured_outputs", "top_k"),
}


def check_extra(extra: Json | None, neutral: Json, no_effect: Set[str]) -> Json:
    """Return the sampling settings among the extra keys of a request, and refuse the others.

    Values in `neutral` and keys in `no_effect` change nothing.
    """
    passed: Json = {}
    for key, value in (extra or {}).items():
        if value is None or key in no_effect or value == neutral.get(key, ...):
            continue
        if key not in SAMPLING:
            raise Unsupported(f"`{key}` is not supported")
        passed[key] = value
    return passed


def check_keys(field: str, value: Json | None, known: Set[str], neutral: Json) -> None:
    """Refuse a key inside a field by its path, unless it is known, null or its value neutral."""
    for key, part in (value or {}).items():
        if key not in known and part is not None and part != neutral.get(key, ...):
            path = f"{field}.{key}"
            raise Unsupported(
                f"`{path}` is not supported", hint=f"Remove `{key}` from `{field}`", param=path
            )


def chat_request(**fields: Any) -> ChatRequest:
    """A chat with the fields that are not None. An invalid field is the client's error."""
    try:
        return ChatRequest.model_validate({k: v for k, v in fields.items() if v is not None})
    except pydantic.ValidationError as error:
        faults = [{**fault, "loc": ("body", *fault["loc"])} for fault in error.errors()]
        raise RequestValidationError(faults) from error


def choice_id(choice: Json) -> Json:
    """The field by which the ledger finds a choice, for the objects that are made from it."""
    return {CHOICE_ID: choice[CHOICE_ID]} if choice.get(CHOICE_ID) else {}
