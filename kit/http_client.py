"""Many HTTP requests at the same time, for a fifth of the processor time that httpx needs."""

import functools
import io
import json
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
        self._headers = headers
        self._timeout = aiohttp.ClientTimeout(sock_connect=connect_timeout, sock_read=read_timeout)
        self._socket = socket
        self._session: aiohttp.ClientSession | None = None

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
        if body is not None:
            options |= {"data": _encoded(body), "headers": {"Content-Type": "application/json"}}
        if not self._socket:
            options["proxy"] = _proxy(*urlsplit(url)[:2])
        if url.startswith("https:"):
            options["ssl"] = _tls()
        target = URL(f"http://socket{url}" if self._socket else url, encoded=True)
        with _translated():
            response = await self._open().request(method, target, allow_redirects=False, **options)
        async with response:
            yield response

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            limits: dict[str, Any] = {"limit": 0, "keepalive_timeout": IDLE_S}
            connector = (
                aiohttp.UnixConnector(str(self._socket), **limits)
                if self._socket
                else aiohttp.TCPConnector(**limits)
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                timeout=self._timeout,
            )
        return self._session

    async def aclose(self) -> None:
        """Close all connections. Requests under way fail."""
        if self._session is not None:
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
    except aiohttp.ClientConnectorError as error:
        raise ConnectionFailed(error.strerror or str(error)) from error
    except (aiohttp.ClientError, OSError) as error:
        raise ConnectionFailed(str(error) or type(error).__name__) from error


@functools.cache  # it reads every certificate of the world
def _tls() -> ssl.SSLContext:
    return httpx.create_ssl_context()  # with certifi's: some machines have none of their own


def _encoded(body: Json) -> bytes | io.BytesIO:
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    return text if len(text) < LARGE else io.BytesIO(text)


@functools.cache
def _proxy(scheme: str, host: str) -> str | None:
    """The proxy that the environment names for a host, for example in `HTTPS_PROXY`."""
    proxies = getproxies()
    if not proxies or proxy_bypass(host.rpartition("@")[2]):
        return None
    return proxies.get(scheme) or proxies.get("all")
