"""Many requests at once have a client each, and later ones use them again."""

import asyncio

import httpx
import pytest

from kit.http_clients import HttpClients


class Server(httpx.AsyncBaseTransport):
    """Answers when `answer` is set, and fails on `/broken`."""

    def __init__(self, answer: asyncio.Event) -> None:
        self.answer = answer
        self.most = self.open = 0
        self.closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/broken":
            raise httpx.ConnectError("nobody listens")
        self.open += 1
        self.most = max(self.most, self.open)
        await self.answer.wait()
        self.open -= 1
        return httpx.Response(200, text=request.url.path)

    async def aclose(self) -> None:
        self.closed = True


async def test_each_request_has_a_client_that_is_used_again() -> None:
    servers: list[Server] = []
    answer = asyncio.Event()

    def create() -> httpx.AsyncClient:
        servers.append(Server(answer))
        return httpx.AsyncClient(transport=servers[-1], base_url="http://server")

    clients = HttpClients(create)
    count = 50
    waiting = [asyncio.create_task(clients.request("GET", f"/{n}")) for n in range(count)]
    while sum(server.open for server in servers) < count:
        await asyncio.sleep(0)
    answer.set()
    assert [(await one).text for one in waiting] == [f"/{n}" for n in range(count)]
    assert [server.most for server in servers] == [1] * count
    for _ in range(2 * count):  # one that fails or is read half is used again
        async with clients.stream("GET", "/half") as response:
            assert response.status_code == 200
        with pytest.raises(httpx.ConnectError):
            await clients.request("GET", "/broken")
    await asyncio.gather(*(clients.request("GET", "/again") for _ in range(count)))
    assert len(servers) == count
    answer.clear()
    pending = asyncio.create_task(clients.request("GET", "/late"))
    await asyncio.sleep(0)
    await clients.aclose()
    assert all(server.closed for server in servers)
    answer.set()
    await pending
    await clients.request("GET", "/after")  # with a new client: the old ones are closed
    assert len(servers) == count + 1
    await clients.aclose()
