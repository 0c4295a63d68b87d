"""Parses and checks large request bodies in a thread, so that other requests are not blocked."""

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
    """A FastAPI dependency that returns the body as `kind`, or raises FastAPI's own errors.

    A `digest` field is set to the hash of the body, which is the same if a client sends it again.
    """

    async def read(request: Request) -> BodyT:
        return await asyncio.to_thread(_parse, await request.body(), kind)

    return read


def _parse(body: bytes, kind: type[BodyT]) -> BodyT:
    try:
        value = large_json.parse(body)
        if isinstance(value, dict):
            value["digest"] = hashlib.sha256(body).hexdigest()
        return kind.model_validate(value)
    except pydantic.ValidationError as error:
        faults = [{**fault, "loc": ("body", *fault["loc"])} for fault in error.errors()]
        raise RequestValidationError(faults) from error
    except ValueError as error:
        fault = {"type": "json_invalid", "loc": ("body",), "msg": f"is not JSON: {error}"}
        raise RequestValidationError([fault]) from error
