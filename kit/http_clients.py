"""Many HTTP requests at the same time."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx


class HttpClients:
    """Sends each request through a client of its own, which later requests use again.

    Whenever a request begins or a response ends, httpx goes through all connections of its client.
    With hundreds of requests at once on a single client, that takes longer than a GPU needs to
    answer them.
    """

    def __init__(self, create: Callable[[], httpx.AsyncClient]) -> None:
        self._create = create
        self._clients: list[httpx.AsyncClient] = []
        self._idle: list[httpx.AsyncClient] = []

    async def request(self, method: str, url: str, **options: Any) -> httpx.Response:
        """Send a request and read the whole response."""
        with self._client() as client:
            return await client.request(method, url, **options)

    @asynccontextmanager
    async def stream(self, method: str, url: str, **options: Any) -> AsyncIterator[httpx.Response]:
        """Send a request and yield the response before its body is read."""
        with self._client() as client:
            async with client.stream(method, url, **options) as response:
                yield response

    async def aclose(self) -> None:
        clients, self._clients, self._idle = self._clients, [], []
        for client in clients:
            await client.aclose()

    @contextmanager
    def _client(self) -> Iterator[httpx.AsyncClient]:
        if not self._idle:
            self._clients.append(self._create())
            self._idle.append(self._clients[-1])
        client = self._idle.pop()  # the one used last, whose connection is still open
        try:
            yield client
        finally:
            if not client.is_closed:
                self._idle.append(client)
