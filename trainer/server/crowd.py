"""Refuses requests for samples beyond a stated number, so that a crowd cannot fill the memory."""

import re

from starlette.types import ASGIApp, Receive, Scope, Send

from trainer.server.error_answers import error

RETRY_AFTER = 5  # seconds; clients of OpenAI and Anthropic wait this long and try again
_ROUTE = re.compile(r"(/rollouts/[^/]+)?/v1/(chat/completions|completions|responses|messages)/?")


class Crowd:
    """Answers 429 while `limit` requests wait or are being sampled."""

    def __init__(self, app: ASGIApp, *, limit: int) -> None:
        self._app = app
        self._limit = limit
        self._present = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        counts = scope["type"] == "http" and scope["method"] == "POST"
        if not counts or not _ROUTE.fullmatch(scope["path"]):
            return await self._app(scope, receive, send)
        if self._present >= self._limit:
            answer = error(
                429,
                f"{self._present} requests are waiting or being sampled already",
                "Send fewer at once, or raise `--max-requests` of `trainer serve`",
                code="rate_limit_exceeded",
            )
            answer.headers["retry-after"] = str(RETRY_AFTER)
            return await answer(scope, receive, send)
        self._present += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._present -= 1
