"""JSON that somebody else wrote, and JSON that is written fast."""

import dataclasses
import json
from typing import Any

import pydantic
from pydantic_core import to_json, to_jsonable_python


def parse(text: str) -> Any:
    """Return the value of a JSON text. Whatever is wrong with it is a `JSONDecodeError`.

    One that is nested too deeply is not JSON either.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", "", 0) from None


def dump(value: Any) -> bytes:
    """Return a value, which may hold models and dataclasses, as JSON in UTF-8.

    A step has an object for each sampled token: `json.dumps` takes several times as long.
    """
    try:
        return to_json(value, inf_nan_mode="constants")
    except ValueError:  # half of a surrogate pair, as a cut emoji leaves it, or 255 levels
        return json.dumps(value, default=_one_level).encode()


def _one_level(value: Any) -> Any:
    if isinstance(value, pydantic.BaseModel):
        return dict(value)
    if dataclasses.is_dataclass(value):
        return vars(value)
    return to_jsonable_python(value)
