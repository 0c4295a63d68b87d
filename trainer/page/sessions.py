"""Opens the page for a browser where the API needs a key, without the key in any address.

Someone with the key asks for a token, which works once and for a minute. `GET /?token=...` turns it
into a cookie, which opens the page, its files and the reading part of its API, and nothing else.
"""

import secrets
import time
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

COOKIE = "art_page"
TOKEN_SECONDS = 60
SESSION_SECONDS = 12 * 3600
MOST = 1000
"""Tokens or sessions at once; the oldest go first."""


class Sessions:
    """Tokens and sessions, in memory: a server that restarts has none."""

    def __init__(self) -> None:
        self._tokens: dict[str, float] = {}
        self._sessions: dict[str, float] = {}

    def new_token(self) -> str:
        return _add(self._tokens, TOKEN_SECONDS)

    def redeem(self, token: str) -> str | None:
        """A new session for a token that is valid, which it then no longer is."""
        ends = self._tokens.pop(token, 0.0)
        return _add(self._sessions, SESSION_SECONDS) if ends > time.monotonic() else None

    def may_pass(self, scope: Any) -> bool:
        """Whether a request without the key may pass: it opens the page, or logs in."""
        path = scope["path"]
        if scope["method"] not in ("GET", "HEAD") or not is_page(path):
            return False
        if path == "/" and "token" in parse_qs(scope["query_string"].decode("latin-1")):
            return True  # the route redeems it
        headers = dict(scope["headers"])
        try:
            cookies = SimpleCookie(headers.get(b"cookie", b"").decode("latin-1"))
        except CookieError:
            return False
        found = cookies.get(COOKIE)
        return found is not None and self._sessions.get(found.value, 0.0) > time.monotonic()


def is_page(path: str) -> bool:
    """Whether a path belongs to the page."""
    return path == "/" or path.startswith(("/files/", "/api/"))


def _add(known: dict[str, float], seconds: float) -> str:
    now = time.monotonic()
    for name in [name for name, ends in known.items() if ends <= now]:
        del known[name]
    while len(known) >= MOST:
        del known[next(iter(known))]
    name = secrets.token_urlsafe(32)
    known[name] = now + seconds
    return name
