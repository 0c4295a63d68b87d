"""Many HTTP requests at the same time."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx

AT_ONCE = 16  # requests of one client


class HttpClients:
    """Sends requests through as many clients as they need, each with a few at a time.

    At every request and every end of a response, httpx looks at all connections of its client. With
    a single client a thousand requests at once would take millions of looks, and the program that
    sends them would be slower than the GPU that answers.
    """

    def __init__(self, create: Callable[[], httpx.AsyncClient]) -> None:
        self._create = create
        self._busy: dict[httpx.AsyncClient, int] = {}

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
        clients, self._busy = list(self._busy), {}
        for client in clients:
            await client.aclose()

    @contextmanager
    def _client(self) -> Iterator[httpx.AsyncClient]:
        counts = self._busy  # another one once these clients are closed
        client = next((each for each, busy in counts.items() if busy < AT_ONCE), None)
        client = client or self._create()
        counts[client] = counts.get(client, 0) + 1
        try:
            yield client
        finally:
            counts[client] -= 1
