"""Large request bodies, parsed and checked in a thread so that other requests are answered."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pydantic
from fastapi import Request
from fastapi.exceptions import RequestValidationError

from trainer.processes import large_json

BodyT = TypeVar("BodyT", bound=pydantic.BaseModel)


def large(kind: type[BodyT]) -> Callable[[Request], Awaitable[BodyT]]:
    """A FastAPI dependency: the body as `kind`, with the errors that FastAPI itself would give.

    A `kind` with a `digest` is given that of the bytes: a client that asks again sends the same.
    """

    async def read(request: Request) -> BodyT:
        return await asyncio.to_thread(_parse, await request.body(), kind)

    return read


def _parse(body: bytes, kind: type[BodyT]) -> BodyT:
    try:
        found = large_json.parse(body)
        if isinstance(found, dict):
            found["digest"] = hashlib.sha256(body).hexdigest()
        return kind.model_validate(found)
    except pydantic.ValidationError as error:
        faults = [{**fault, "loc": ("body", *fault["loc"])} for fault in error.errors()]
        raise RequestValidationError(faults) from error
    except ValueError as error:
        fault = {"type": "json_invalid", "loc": ("body",), "msg": f"is no JSON: {error}"}
        raise RequestValidationError([fault]) from error
