"""Errors as JSON: ART's clients and curl read `detail`, OpenAI's and Anthropic's read `error`."""

import json
import logging
import re
import sqlite3

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from kit.errors import KitError
from kit.types import Json
from trainer.errors import Unsupported, is_storage_fault, storage_error

logger = logging.getLogger(__name__)
PAGE = "`docs/api.md` lists what is served"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_CODES = {401: "invalid_api_key", 413: "request_too_large"}
_TEXT_ONLY = "Only text is served; give the agent another provider for this"
_NO_STORAGE = (
    "No files are stored; send the conversation to `/v1/chat/completions`, or continue it with "
    "`previous_response_id` of `/v1/responses`"
)
# Routes of other servers that agents try, and what to do instead.
_UNSERVED = {
    "embeddings": "This server has no embeddings; give the agent's retriever another provider",
    "audio": _TEXT_ONLY,
    "images": _TEXT_ONLY,
    "videos": _TEXT_ONLY,
    "realtime": _TEXT_ONLY,
    "moderations": "Moderate with another provider, or turn the agent's moderation off",
    "assistants": _NO_STORAGE,
    "threads": _NO_STORAGE,
    "conversations": _NO_STORAGE,
    "files": _NO_STORAGE,
    "uploads": _NO_STORAGE,
    "vector_stores": _NO_STORAGE,
    "batches": "Send the requests concurrently; the engine batches them",
    "fine_tuning": "Train with an ART client or `trainer finetune`",
    "evals": "Evaluate beside the agent with `trainer eval`",
    "complete": "Use `/v1/messages` or `/v1/completions`",
    "rerank": "This server has no reranker; use another provider",
    "score": "This server has no scorer; use another provider",
    "tokenize": "Every answer has the token ids of its prompt and completion",
}
_OTHERS = [
    (r"/v1/responses/[^/]+/", "Use `GET /v1/responses/ID`, which returns the response alone"),
    (r"/v1/messages/batches", "Send the requests concurrently; the engine batches them"),
    (r"/v1/v1/", "The base URL ends with `/v1` twice; remove one"),
    (r"/openai/deployments/", "Use the plain OpenAI client in place of Azure's, with a base URL"),
    (r"/api/(chat|generate|tags|show)", "Use the agent's OpenAI provider in place of Ollama's"),
    (r"/v1beta/", "Use the agent's OpenAI provider in place of Gemini's"),
    (
        r"/(chat/completions|completions|responses|messages|models)\b",
        "The base URL must end with `/v1`",
    ),
]
_AGENT_API = re.compile(r"(/rollouts/[^/]+)?/v1/(?!preview/)")


def error(
    status: int, message: str, hint: str, *, param: str | None = None, code: str | None = None
) -> JSONResponse:
    """An error response."""
    body = _object(status, message, hint, param, code)
    return JSONResponse({"detail": message, "error": body}, status_code=status)


def error_event(fault: KitError) -> str:
    """The last event of a stream that cannot be completed, as OpenAI's clients read it."""
    status, code = getattr(fault, "status", 500), getattr(fault, "code", None)
    body = _object(status, fault.message, fault.hint, None, code)
    return f"data: {json.dumps({'error': body})}\n\n"


def _object(status: int, message: str, hint: str, param: str | None, code: str | None) -> Json:
    """The object of an error; its type follows from the status, as OpenAI's does."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    code = code or _CODES.get(status)
    return {"message": message, "hint": hint, "type": kind, "param": param, "code": code}


def add_handlers(app: FastAPI) -> None:
    """Turn every error of a route into an error response."""

    @app.exception_handler(KitError)
    async def kit_error(request: Request, fault: KitError) -> JSONResponse:
        hint = fault.hint
        served = isinstance(fault, Unsupported) and _AGENT_API.match(request.url.path)
        if served and PAGE not in hint:
            hint = f"{hint}; {PAGE}"
        return error(
            getattr(fault, "status", 500),
            fault.message,
            hint,
            param=getattr(fault, "param", None),
            code=getattr(fault, "code", None),
        )

    @app.exception_handler(OSError)
    @app.exception_handler(sqlite3.Error)
    async def storage_fault(request: Request, fault: OSError | sqlite3.Error) -> JSONResponse:
        if not is_storage_fault(fault):
            raise fault  # a bug, which is logged with its traceback
        logger.error("%s `%s`: %s", request.method, request.url.path, fault)
        return await kit_error(request, storage_error(fault))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, fault: RequestValidationError) -> JSONResponse:
        places = [_place(each) for each in fault.errors()]
        messages = [
            f"`{place}` {_fault(each)}" for place, each in zip(places, fault.errors(), strict=True)
        ]
        # OpenAI's API says 400; ART's servers have always said 422.
        agents = _AGENT_API.match(request.url.path)
        return error(
            400 if agents else 422,
            "The request is not valid: " + "; ".join(messages),
            f"Fix `{places[0]}`; {PAGE}" if agents else "",
            param=places[0],
            code="invalid_value",
        )

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, fault: HTTPException) -> JSONResponse:
        path = request.url.path
        message = f"{request.method} `{path}`: {fault.detail}"
        hint = _alternative(path) if fault.status_code == 404 else ""
        if fault.status_code == 405:
            allowed = (fault.headers or {}).get("Allow")
            hint = f"Use {allowed}" if allowed else PAGE
        return error(fault.status_code, message, hint)

    @app.exception_handler(Exception)
    async def failure(request: Request, fault: Exception) -> JSONResponse:
        message = f"{request.method} `{request.url.path}` failed: {type(fault).__name__}"
        return error(500, message, "This is a bug in the server; its log has the traceback")


def _alternative(path: str) -> str:
    """The alternative to a route that does not exist."""
    path = re.sub(r"^/rollouts/[^/]+", "", path)
    name = path.removeprefix("/v1/").partition("/")[0] if path.startswith("/v1/") else ""
    found = _UNSERVED.get(name) or next(
        (hint for pattern, hint in _OTHERS if re.match(pattern, path)), None
    )
    return f"{found}; {PAGE}" if found else PAGE


def _fault(fault: Json) -> str:
    """The words of a fault; FastAPI keeps those of a JSON parser apart."""
    cause = fault.get("ctx", {}).get("error") if fault["type"] == "json_invalid" else None
    return f"is not JSON: {cause}" if cause else str(fault["msg"])


def _place(fault: Json) -> str:
    """The path of a fault inside the body; a body that is not JSON has no such path."""
    inside = [] if fault["type"] == "json_invalid" else fault["loc"][1:]
    return ".".join(str(part) for part in inside) or "body"
