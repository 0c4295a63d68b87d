"""Refuses requests that a web page makes a browser send.

The control clients of ART and NAT send no key, so on loopback the address is the only lock. A page
on the internet can still reach it in two ways. It may send requests to `localhost`, which the
browser labels with `Origin`. Or its own name may suddenly resolve to 127.0.0.1 (DNS rebinding), and
then `Host` still has that name.
"""

import functools
import ipaddress
import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from trainer.server.error_answers import error

_AUTHORITY = re.compile(r"(?:\[([0-9a-f:.]+)\]|([0-9a-z._-]+))(?::[0-9]*)?")


class BrowserGuard:
    """Answers 403 to a foreign `Host` or `Origin`.

    If the server requires a key, any `Host` may pass: another check asks for the key, which no
    browser sends by itself.
    """

    def __init__(
        self, app: ASGIApp, *, host: str, allowed: Iterable[str], any_host: bool = False
    ) -> None:
        self._app = app
        self._any_host = any_host
        self._own = frozenset(name.lower() for name in (host, *allowed))
        self._is_own = functools.lru_cache(256)(self._is_own_name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        fault = self._fault(scope["method"], scope["headers"])
        if fault is None:
            return await self._app(scope, receive, send)
        await error(403, *fault)(scope, receive, send)

    def _fault(self, method: str, headers: list[tuple[bytes, bytes]]) -> tuple[str, str] | None:
        """A sentence and a hint, or None if the request may pass."""
        found: dict[bytes, bytes] = {}
        for name, value in headers:
            if name in (b"host", b"origin") and name in found:
                word = name.decode().capitalize()
                return f"The request has two headers `{word}`", "Send it once"
            found[name] = value
        host = found.get(b"host", b"").decode("latin-1")
        if host and not self._any_host and not self._is_own(host):
            return (
                f"The request was sent to `{host[:100]}`, which is not a name of this server",
                "Use `localhost`, or start the server with `--allowed-host NAME`",
            )
        if (sent := found.get(b"origin")) is None:
            return _without_origin(method, found)
        origin = sent.decode("latin-1")
        if self._is_own(origin_host(origin)) or _same(origin_host(origin), host):
            return None
        return (
            f"A web page of `{origin[:100]}` sent the request, and may not use this server",
            "Call the server from a program, or start it with `--allowed-host NAME`",
        )

    def _is_own_name(self, authority: str) -> bool:
        name = name_of(authority)
        return name is not None and (name in self._own or name == "localhost" or is_local(name))


def _without_origin(method: str, headers: dict[bytes, bytes]) -> tuple[str, str] | None:
    """Browsers leave `Origin` out of plain GETs, but say that another site's page made them.

    Following a link to a page is fine: the other site does not see the answer.
    """
    if headers.get(b"sec-fetch-site") != b"cross-site":
        return None
    if method in ("GET", "HEAD") and headers.get(b"sec-fetch-dest") == b"document":
        return None
    return (
        "A web page of another site sent the request, and may not use this server",
        "Call the server from a program",
    )


def origin_host(origin: str) -> str:
    """The `HOST:PORT` of an origin; empty for `null` and anything that is no web page's."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return ""
    return parts.netloc if parts.scheme in ("http", "https") else ""


def name_of(authority: str) -> str | None:
    """The name or address in `HOST:PORT`, in lower case, or None if it is neither."""
    match = _AUTHORITY.fullmatch(authority.lower())
    return (match[1] or match[2]) if match else None


def is_local(name: str) -> bool:
    """Whether a name is an address of this machine alone: 127.0.0.0/8, ::1, or 0.0.0.0 for all."""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_unspecified


def _same(origin: str, host: str) -> bool:
    return bool(origin) and name_of(origin) is not None and name_of(origin) == name_of(host)
