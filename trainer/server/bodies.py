"""Large request bodies, parsed and checked in a thread so that other requests are answered."""

import asyncio
import gc
import hashlib
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pydantic
from fastapi import Request
from fastapi.exceptions import RequestValidationError

from trainer import pieces

BodyT = TypeVar("BodyT", bound=pydantic.BaseModel)


def large(
    kind: type[BodyT], *, then: Callable[[BodyT], None] = lambda _: None
) -> Callable[[Request], Awaitable[BodyT]]:
    """A FastAPI dependency: the body as `kind`, with the errors that FastAPI itself would give.

    `then` is done with it in the same thread. A `kind` with a `digest` is given that of the bytes:
    a client that asks again sends the same.
    """

    async def read(request: Request) -> BodyT:
        return await asyncio.to_thread(take, await request.body())

    def take(body: bytes) -> BodyT:
        with _uncollected():
            found = _parse(body, kind)
            then(found)
            return found

    return read


_collecting = threading.Lock()
_not_now = 0


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collection meanwhile.

    A step's groups are half a million objects without a cycle, most of which go when choices are
    matched with the ledger: to look through them costs a quarter of their parsing.
    """
    global _not_now
    with _collecting:
        _not_now += 1
        gc.disable()
    try:
        yield
    finally:
        with _collecting:
            _not_now -= 1
            if not _not_now:
                gc.enable()


def _parse(body: bytes, kind: type[BodyT]) -> BodyT:
    try:
        found = pieces.parse(body)
        if isinstance(found, dict):
            found["digest"] = hashlib.sha256(body).hexdigest()
        return kind.model_validate(found)
    except pydantic.ValidationError as error:
        faults = [{**fault, "loc": ("body", *fault["loc"])} for fault in error.errors()]
        raise RequestValidationError(faults) from error
    except ValueError as error:
        fault = {"type": "json_invalid", "loc": ("body",), "msg": f"is no JSON: {error}"}
        raise RequestValidationError([fault]) from error
