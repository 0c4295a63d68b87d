"""Many HTTP requests at the same time, for a quarter of the processor time that httpx needs."""

import asyncio
import functools
import io
import json
import os
import socket as sockets
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import httpx
from yarl import URL

from kit.types import Json

# Servers close idle connections, uvicorn after 5 s: a request sent at that moment would be lost.
IDLE_S = 4.0
LARGE = 1 << 20  # bytes; aiohttp sends larger bodies only from files without a warning
LONGEST_HEADER = 100 << 10  # bytes; aiohttp's own limit is 8 kB, less than some servers send


class ConnectionFailed(Exception):
    """No connection could be opened, or it broke before the whole response was there."""


class ResponseTimeout(Exception):
    """The server accepted the request, but sent nothing for too long."""


@dataclass(frozen=True)
class Response:
    """A whole response."""

    status: int
    content: bytes
    content_type: str

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")

    def json(self) -> Any:
        return json.loads(self.content)


class Stream:
    """A response whose body is read bit by bit."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status

    async def whole(self) -> Response:
        with _translated():
            content = await self._response.read()
        return Response(self.status, content, self._response.content_type)

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the body's bytes as they arrive."""
        while True:
            with _translated():
                part = await self._response.content.readany()
            if not part:
                return
            yield part


class HttpClient:
    """Sends requests to one server over as many connections as it needs.

    It uses aiohttp: with hundreds of requests at once, httpx takes longer to send them than a GPU
    takes to answer (`bench/http_client.py`). Nothing connects before the first request, and a
    client that was closed opens again.
    """

    def __init__(
        self,
        *,
        headers: Mapping[str, str] | None = None,
        connect_timeout: float | None = None,
        read_timeout: float | None = None,
        socket: Path | None = None,
    ) -> None:
        """`read_timeout` is for each part of a response. `socket` is a file the server listens on.

        Timeouts are in seconds; None waits forever.
        """
        self._headers = dict(headers or {})
        # `sock_connect` would leave out the look-up of the name, and the reply of a proxy.
        self._timeout = aiohttp.ClientTimeout(connect=connect_timeout, sock_read=read_timeout)
        # `sock_read` starts when the request is sent, and some servers never read a large one.
        self._begins_within = None
        if connect_timeout is not None and read_timeout is not None:
            self._begins_within = connect_timeout + read_timeout
        self._socket = socket
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def request(
        self, method: str, url: str, body: Json | None = None, *, within: float | None = None
    ) -> Response:
        """Send a request and read the whole response, all of it `within` so many seconds."""
        options = {} if within is None else {"timeout": aiohttp.ClientTimeout(total=within)}
        async with self._sent(method, url, body, **options) as response:
            return await Stream(response).whole()

    @asynccontextmanager
    async def stream(self, method: str, url: str, body: Json) -> AsyncIterator[Stream]:
        """Send a request and yield the response before its body is read."""
        async with self._sent(method, url, body) as response:
            yield Stream(response)

    @asynccontextmanager
    async def _sent(
        self, method: str, url: str, body: Json | None, **options: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = self._headers
        if body is not None:
            headers = {**headers, "Content-Type": "application/json"}
            options["data"] = _encoded(body)
        with _translated():
            target = self._target(url, options)
        if target.user or target.password:  # aiohttp refuses both, httpx prefers those in the URL
            headers = {name: text for name, text in headers.items() if name != "Authorization"}
        async with self._open() as session:
            with _translated():
                async with asyncio.timeout(self._begins_within):
                    # A session's own headers would be sent to the proxy too, with the key in them.
                    response = await session.request(
                        method, target, headers=headers, allow_redirects=False, **options
                    )
            async with response:
                yield response

    def _target(self, url: str, options: dict[str, Any]) -> URL:
        """Return where a request is sent, and add `options` on how to get there."""
        if self._socket:
            return URL(f"http://socket{url}", encoded=True)
        scheme, host = urlsplit(url)[:2]
        if scheme not in ("http", "https") or not host:
            raise ConnectionFailed("the URL must begin with `http://` or `https://` and a host")
        options["proxy"] = _proxy(scheme, host)
        if scheme == "https":
            options["ssl"] = _tls()
        return URL(url)

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[aiohttp.ClientSession]:
        loop = asyncio.get_running_loop()
        if self._session is None or self._session.closed or (self._loop and self._loop.is_closed()):
            self._session, self._loop = self._new(), loop
        if loop is self._loop:
            yield self._session
        else:  # code in another thread, and connections work in a single loop only
            async with self._new() as session:
                yield session

    def _new(self) -> aiohttp.ClientSession:
        limits: dict[str, Any] = {"limit": 0, "keepalive_timeout": IDLE_S}
        connector = (
            aiohttp.UnixConnector(str(self._socket), **limits)
            if self._socket
            else aiohttp.TCPConnector(**limits)
        )
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=self._timeout,
            max_line_size=LONGEST_HEADER,
            max_field_size=LONGEST_HEADER,
        )

    async def aclose(self) -> None:
        """Close all connections. Requests under way fail."""
        if self._session is not None and self._loop is asyncio.get_running_loop():
            await self._session.close()


@contextmanager
def _translated() -> Iterator[None]:
    """Turn aiohttp's errors into ours."""
    try:
        yield
    except aiohttp.ConnectionTimeoutError as error:
        raise ConnectionFailed("connecting took too long") from error
    except TimeoutError as error:
        raise ResponseTimeout("no response in time") from error
    except (aiohttp.ClientError, OSError) as error:
        raise ConnectionFailed(_reason(error)) from error
    except ValueError as error:  # also of a host's name, or of a line break in a header
        raise ConnectionFailed(f"the request cannot be sent: {error}") from error


def _reason(error: Exception) -> str:
    """Say what happened, without aiohttp's representations: some hold the password of a proxy."""
    match error:
        case aiohttp.ClientHttpProxyError():
            return f"the proxy answered {error.status} {error.message}"
        case aiohttp.ClientProxyConnectionError():
            return f"no connection to the proxy: {_system_reason(error.os_error)}"
        case aiohttp.ClientConnectorCertificateError():
            return f"its certificate is not trusted: {error.certificate_error}"
        case aiohttp.ClientConnectorError():
            return _system_reason(error.os_error)
        case aiohttp.ClientPayloadError():
            return "the response is incomplete or damaged"
        case aiohttp.ClientResponseError():  # its status is 400, which the server never sent
            return f"the response cannot be read: {' '.join(error.message.split()) or 'no HTTP'}"
        case OSError() if not isinstance(error, aiohttp.ServerDisconnectedError):
            return _system_reason(error)
    return str(error) or type(error).__name__


def _system_reason(error: OSError) -> str:
    if isinstance(error, sockets.gaierror | ssl.SSLError):  # whose numbers are their own
        return error.strerror or str(error)
    return os.strerror(error.errno) if error.errno else "the connection broke"


@functools.cache  # it reads every certificate of the world
def _tls() -> ssl.SSLContext:
    try:
        return httpx.create_ssl_context()  # with certifi's: some machines have none of their own
    except OSError as error:
        raise ConnectionFailed(
            f"the certificates in `SSL_CERT_FILE` cannot be read: {error.strerror}"
        ) from error


def _encoded(body: Json) -> bytes | io.BytesIO:
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    return text if len(text) < LARGE else io.BytesIO(text)


@functools.cache
def _proxy(scheme: str, host: str) -> URL | None:
    """The proxy that the environment names for a host, for example in `HTTPS_PROXY`."""
    proxies = getproxies()
    address = host.rpartition("@")[2]
    # `proxy_bypass` knows neither a `*` in a list nor `::1` without brackets.
    direct = {name.strip() for name in proxies.get("no", "").split(",")}
    proxy = proxies.get(scheme) or proxies.get("all")
    if not proxy or direct & {"*", urlsplit(f"//{address}").hostname} or proxy_bypass(address):
        return None
    url = URL(proxy if "://" in proxy else f"http://{proxy}")
    if url.scheme not in ("http", "https") or not url.host:
        raise ConnectionFailed(
            f"a `{url.scheme}` proxy cannot be used: name an HTTP proxy in "
            f"`{scheme.upper()}_PROXY`, or the host in `NO_PROXY`"
        )
    return url
