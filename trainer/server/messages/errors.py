"""Errors as Anthropic's clients read them, on its routes."""

import json
import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kit.types import Json
from trainer.errors import UnknownThread

_ROUTE = re.compile(r".*/v1/messages(/count_tokens)?/?")
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


def error_body(status: int, message: str) -> Json:
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


class AnthropicErrors:
    """Rewrites the errors of Anthropic's routes.

    It wraps the whole app, because an error may come from the guard, a route or the router.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _ROUTE.fullmatch(scope["path"]):
            send = _Rewriting(send)
        await self._app(scope, receive, send)


class _Rewriting:
    """Holds an error back until it is complete, and sends it in Anthropic's shape."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 400:
            self._start = message
        elif self._start is None or message["type"] != "http.response.body":
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body"):
                await self._finish(self._start)

    async def _finish(self, start: Message) -> None:
        body = _rewritten(start["status"], self._body)
        fixed = (b"content-length", b"content-type")
        kept = [(name, value) for name, value in start["headers"] if name not in fixed]
        length = (b"content-length", str(len(body)).encode())
        headers = [*kept, length, (b"content-type", b"application/json")]
        await self._send({**start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def _rewritten(status: int, body: bytes) -> bytes:
    """The body of an error in Anthropic's shape, with its message and hint in one text."""
    try:
        error = json.loads(body)["error"]
        sentences, code = [error["message"], error.get("hint")], error.get("code")
    except (ValueError, KeyError, TypeError):
        sentences, code = [body.decode(errors="replace")], None
    message = ". ".join(sentence.rstrip(".") for sentence in sentences if sentence)
    rewritten = error_body(status, message)
    if code == UnknownThread.code:
        rewritten["error"]["details"] = {"error_code": code}
    return json.dumps(rewritten).encode()
