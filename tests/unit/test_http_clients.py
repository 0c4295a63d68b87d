"""Many requests at once are spread over clients, which are used again."""

import asyncio

import httpx

from kit.http_clients import AT_ONCE, HttpClients


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


async def test_each_client_has_few_requests_and_is_used_again() -> None:
    servers: list[Server] = []
    answer = asyncio.Event()

    def create() -> httpx.AsyncClient:
        servers.append(Server(answer))
        return httpx.AsyncClient(transport=servers[-1], base_url="http://server")

    clients = HttpClients(create)
    count = 10 * AT_ONCE
    waiting = [asyncio.create_task(clients.request("GET", f"/{n}")) for n in range(count)]
    while sum(server.open for server in servers) < count:
        await asyncio.sleep(0)
    answer.set()
    assert [(await one).text for one in waiting] == [f"/{n}" for n in range(count)]
    assert [server.most for server in servers] == [AT_ONCE] * 10
    for _ in range(2 * AT_ONCE):  # one that fails or is read half keeps no place
        async with clients.stream("GET", "/half") as response:
            assert response.status_code == 200
        try:
            await clients.request("GET", "/broken")
        except httpx.ConnectError:
            continue
    await asyncio.gather(*(clients.request("GET", "/again") for _ in range(count)))
    assert len(servers) == 10
    await clients.aclose()
    assert all(server.closed for server in servers)
