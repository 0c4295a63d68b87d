"""`HttpClient` against a server whose connections can wait, break and stay silent."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kit.http_client import LARGE, ConnectionFailed, HttpClient, ResponseTimeout


class Server:
    """Answers a request with its path and body. `/silent` gets no answer, `/cut` half of one."""

    def __init__(self) -> None:
        self.answer = asyncio.Event()
        self.answer.set()
        self.never = asyncio.Event()
        self.connections = self.open = 0
        self.heads: list[str] = []

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                await self._reply(head, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _reply(
        self, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.heads.append(head)
        path = head.split()[1]
        fields = dict(line.lower().split(": ") for line in head.strip().split("\r\n")[1:])
        body = await reader.readexactly(int(fields.get("content-length", 0)))
        if path == "/break":
            raise ConnectionError
        self.open += 1
        await (self.never if path == "/silent" else self.answer).wait()
        self.open -= 1
        content = json.dumps({"path": path, "received": len(body)}).encode()
        kind, more = "Content-Type: application/json", 10 if path == "/cut" else 0
        length = f"Content-Length: {len(content) + more}"
        writer.write(f"HTTP/1.1 200 OK\r\n{kind}\r\n{length}\r\n\r\n".encode() + content)
        if path == "/cut":
            raise ConnectionError


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    yield Server()


@pytest.fixture
async def url(server: Server) -> AsyncIterator[str]:
    listening = await asyncio.start_server(server.handle, "127.0.0.1", 0, backlog=1024)
    yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    server.never.set()
    listening.close()


@pytest.fixture
async def client() -> AsyncIterator[HttpClient]:
    client = HttpClient(
        headers={"Authorization": "Bearer key"}, connect_timeout=10, read_timeout=30
    )
    yield client
    await client.aclose()


async def test_all_requests_are_sent_at_once_and_connections_used_again(
    server: Server, url: str, client: HttpClient
) -> None:
    count = 300
    server.answer.clear()
    waiting = [asyncio.create_task(client.request("GET", f"{url}/{n}")) for n in range(count)]
    while server.open < count:
        await asyncio.sleep(0.01)
    server.answer.set()
    assert [(await one).json()["path"] for one in waiting] == [f"/{n}" for n in range(count)]
    await asyncio.gather(*(client.request("GET", f"{url}/again") for _ in range(count)))
    assert server.connections == count
    assert all("authorization: bearer key" in head.lower() for head in server.heads)


async def test_paths_are_sent_as_they_are(server: Server, url: str, client: HttpClient) -> None:
    path = "/rollouts/a%2Fb%20c~policy~%7Cx/v1?only=completions"
    assert (await client.request("GET", url + path)).json()["path"] == path


@pytest.mark.parametrize("size", [10, 2 * LARGE])
async def test_bodies_of_any_size_are_sent_whole(url: str, client: HttpClient, size: int) -> None:
    response = await client.request("POST", url, {"text": "x" * size})
    assert response.json()["received"] == size + len('{"text":""}')
    with pytest.raises(ValueError, match="not JSON compliant"):
        await client.request("POST", url, {"temperature": float("nan")})


@pytest.mark.parametrize("path", ["/break", "/cut"])
async def test_a_broken_connection_is_an_error(url: str, client: HttpClient, path: str) -> None:
    with pytest.raises(ConnectionFailed, match=r"disconnected|payload"):
        await client.request("POST", url + path, {})
    assert (await client.request("GET", f"{url}/next")).status == 200


async def test_a_server_that_is_not_there_is_an_error(client: HttpClient) -> None:
    with pytest.raises(ConnectionFailed, match="Connect call failed"):
        await client.request("GET", "http://127.0.0.1:9/")


async def test_a_server_that_stays_silent_is_a_timeout(url: str, client: HttpClient) -> None:
    with pytest.raises(ResponseTimeout):
        await client.request("GET", f"{url}/silent", within=0.1)
    impatient = HttpClient(read_timeout=0.1)
    with pytest.raises(ResponseTimeout):
        await impatient.request("GET", f"{url}/silent")
    await impatient.aclose()


async def test_a_closed_client_fails_requests_under_way_and_opens_again(
    server: Server, url: str, client: HttpClient
) -> None:
    pending = asyncio.create_task(client.request("GET", f"{url}/silent"))
    while not server.open:
        await asyncio.sleep(0.01)
    await client.aclose()
    with pytest.raises(ConnectionFailed):
        await pending
    assert (await client.request("GET", f"{url}/after")).status == 200


async def test_a_socket_file_needs_no_host(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    listening = await asyncio.start_unix_server(server.handle, path)
    client = HttpClient(socket=path)
    async with client.stream("POST", "/v1/x", {"a": 1}) as response:
        body = b"".join([part async for part in response.parts()])
    assert json.loads(body) == {"path": "/v1/x", "received": 7}
    await client.aclose()
    listening.close()


@pytest.mark.parametrize("name", ["HTTP_PROXY", "ALL_PROXY"])
async def test_the_environment_can_name_a_proxy(
    url: str, client: HttpClient, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, url)
    monkeypatch.setenv("NO_PROXY", f"{name}.direct.example")
    far = f"http://{name}.example/v1"
    assert (await client.request("GET", far)).json()["path"] == far
    with pytest.raises(ConnectionFailed):
        await client.request("GET", f"http://{name}.direct.example:9/")
