"""Routers whose bodies are JSON: declared as JSON, and read by `strict_json`."""

import asyncio
import email.message
import hashlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import pydantic
from fastapi import APIRouter, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute

from kit import json_text
from kit.types import Json
from trainer.errors import NotJson
from trainer.server import guard, strict_json

MAX_BYTES = 32 << 20  # of a body without trajectories: no prompt that fits a context needs more
BodyT = TypeVar("BodyT", bound=pydantic.BaseModel)


def json_router(**settings: Any) -> APIRouter:
    return APIRouter(route_class=_JsonRoute, **settings)


class LargeJson(Response):
    """A response that holds many tokens, written in a quarter of the time of `JSONResponse`."""

    media_type = "application/json"

    def render(self, content: Json) -> bytes:
        return json_text.dump(content)


class _JsonRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def checked(request: Request) -> Response:
            request = _JsonRequest(request.scope, request.receive)
            has_body = request.method not in ("GET", "HEAD") and await request.body()
            if has_body:
                _check_type(request.headers.get("content-type"))
            return await handle(request)

        return checked


class _JsonRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        if len(body) > MAX_BYTES:  # FastAPI passes no other error on
            size = f"{len(body) >> 20} MiB is larger than {MAX_BYTES >> 20} MiB"
            raise HTTPException(413, f"The body of {size}, which only trajectories may take")
        if len(body) > guard.LARGE:  # other requests are answered meanwhile
            return await asyncio.to_thread(strict_json.read, body)
        return strict_json.read(body)


def _check_type(content_type: str | None) -> None:
    """A page of another site can send any other type without asking the server first."""
    header = email.message.Message()
    header["content-type"] = content_type or ""
    subtype = header.get_content_subtype()
    is_json = subtype == "json" or subtype.endswith("+json")
    if not is_json or header.get_content_maintype() != "application":
        declared = f"is declared as `{content_type[:80]}`" if content_type else "has no type"
        raise NotJson(f"The body {declared}, instead of JSON")


def large(kind: type[BodyT]) -> Callable[[Request], Awaitable[BodyT]]:
    """A FastAPI dependency that returns a large body as `kind`, or raises FastAPI's own errors.

    It is parsed in a thread, so that other requests are not blocked. A `digest` field is set to the
    hash of the body, which is the same if a client sends it again.
    """

    async def read(request: Request) -> BodyT:
        return await asyncio.to_thread(parse_large, await request.body(), kind)

    return read


def describe(kind: type[pydantic.BaseModel]) -> Json:
    """The part of the OpenAPI document about a `large` body, which FastAPI does not see."""
    schema = kind.model_json_schema(mode="validation")
    for hidden in ("digest",):  # computed here, never sent
        schema["properties"].pop(hidden, None)
        schema["required"] = [name for name in schema.get("required", []) if name != hidden]
    # The document has no place for the definitions of one route, so each reference is replaced.
    schema = _without_references(schema, schema.pop("$defs", {}))
    return {"requestBody": {"content": {"application/json": {"schema": schema}}, "required": True}}


def _without_references(value: Any, definitions: Json) -> Any:
    if isinstance(value, list):
        return [_without_references(item, definitions) for item in value]
    if not isinstance(value, dict):
        return value
    if reference := value.get("$ref"):
        return _without_references(definitions[reference.rpartition("/")[2]], definitions)
    return {key: _without_references(item, definitions) for key, item in value.items()}


def parse_large(body: bytes, kind: type[BodyT]) -> BodyT:
    try:
        value = strict_json.read_large(body)
        if isinstance(value, dict):
            value["digest"] = hashlib.sha256(body).hexdigest()
        return kind.model_validate(value)
    except pydantic.ValidationError as error:
        faults = [{**fault, "loc": ("body", *fault["loc"])} for fault in error.errors()]
        raise RequestValidationError(faults) from error
    except ValueError as error:
        fault = {"type": "json_invalid", "loc": ("body",), "msg": f"is not JSON: {error}"}
        raise RequestValidationError([fault]) from error
