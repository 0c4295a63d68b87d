"""Checks before every route: the key, and the size and depth of the body."""

import asyncio
import hmac
import re
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trainer.page.sessions import Sessions
from trainer.server.error_answers import error

OPEN_PATHS = {"/health", "/healthcheck"}
MAX_BYTES = 512 << 20  # a train request holds every trajectory of a step
LARGE = 1 << 18  # from this size on, the body is scanned in a thread
MAX_DEPTH = 64  # the deepest values that clients send are the JSON schemas of tools
_KEEP = b'"[]{}'
_DROP = bytes(byte for byte in range(256) if byte not in _KEEP)


class Guard:
    """Answers 401, 413 and 400 itself; requests that pass have a complete, bounded body."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        key: str | None,
        max_bytes: int = MAX_BYTES,
        sessions: Sessions | None = None,
    ) -> None:
        self._app = app
        self._key = key.encode() if key else None
        self._max_bytes = max_bytes
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        opens_page = self._sessions is not None and self._sessions.may_pass(scope)
        if not opens_page and not self._may_pass(scope["path"], headers):
            hint = "Send `ART_API_KEY` as bearer token: it is the API key of the agent's client"
            answer = error(401, "The request carries no valid key", hint)
            return await answer(scope, receive, send)
        if scope["method"] in ("GET", "HEAD"):
            return await self._app(scope, receive, send)
        body = await self._read(headers, receive)
        if body is None:
            size = f"{self._max_bytes >> 20} MiB" if self._max_bytes >> 20 else self._max_bytes
            answer = error(413, f"The body is larger than {size}", "Send fewer groups at a time")
            return await answer(scope, receive, send)
        if await asyncio.to_thread(too_deep, body) if len(body) > LARGE else too_deep(body):
            answer = error(400, f"The body is nested deeper than {MAX_DEPTH}", "Flatten it")
            return await answer(scope, receive, send)
        await self._app(scope, _Replay(body, receive), send)

    def _may_pass(self, path: str, headers: dict[bytes, bytes]) -> bool:
        if self._key is None or path in OPEN_PATHS:
            return True
        bearer = hmac.compare_digest(headers.get(b"authorization", b""), b"Bearer " + self._key)
        # Anthropic's clients send their key in a header of its own.
        return bearer or hmac.compare_digest(headers.get(b"x-api-key", b""), self._key)

    async def _read(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18 or int(length) > self._max_bytes:
            return None
        body = bytearray()
        while True:
            message = await receive()
            body += message.get("body", b"")
            if len(body) > self._max_bytes:
                return None
            if not message.get("more_body"):
                return bytes(body)


class _Replay:
    """Passes the body that was read to the app, then later messages such as a disconnect."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._first: dict[str, Any] | None = {"type": "http.request", "body": body}
        self._receive = receive

    async def __call__(self) -> Message:
        if self._first is not None:
            message, self._first = self._first, None
            return message
        return await self._receive()


def too_deep(body: bytes) -> bool:
    """Whether JSON is nested deeper than MAX_DEPTH, without parsing it.

    A parser would recurse, and code that walks a parsed body later might recurse too deeply.
    """
    brackets = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _DROP)
    # Two quotes in a row are an empty string, or end one string and begin the next: drop them.
    brackets = re.sub(rb'"[^"]*"', b"", brackets.replace(b'""', b""))
    if brackets.count(b"[") + brackets.count(b"{") <= MAX_DEPTH:
        return False
    for _ in range(MAX_DEPTH):  # each round removes the innermost level
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
    return b"[" in brackets or b"{" in brackets
