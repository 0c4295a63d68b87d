"""`HttpClient` against a server whose connections can wait, break and stay silent."""

import asyncio
import base64
import json
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kit.http_client import LARGE, ConnectionFailed, HttpClient, ResponseTimeout, _proxy, _tls


class Server:
    """Answers a request with its path and body. `/silent` gets no answer, `/cut` half of one.

    As a proxy, it refuses every tunnel.
    """

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
        if path == "/header":
            kind += "\r\nX-Long: " + "x" * 20_000
        length = f"Content-Length: {len(content) + more}"
        status = "407 No Key" if head.startswith("CONNECT") else "200 OK"
        writer.write(f"HTTP/1.1 {status}\r\n{kind}\r\n{length}\r\n\r\n".encode() + content)
        if path == "/cut":
            raise ConnectionError


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Forget what the environment of another test named."""
    _proxy.cache_clear()
    _tls.cache_clear()
    yield
    _proxy.cache_clear()
    _tls.cache_clear()


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
    with pytest.raises(ConnectionFailed, match=r"disconnected|incomplete or damaged"):
        await client.request("POST", url + path, {})
    assert (await client.request("GET", f"{url}/next")).status == 200


async def test_a_server_that_is_not_there_is_an_error(client: HttpClient) -> None:
    with pytest.raises(ConnectionFailed, match="Connection refused"):
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
    monkeypatch.setenv("NO_PROXY", f"{name.lower()}.direct.example")
    far = f"http://{name.lower()}.example/v1"
    assert (await client.request("GET", far)).json()["path"] == far
    with pytest.raises(ConnectionFailed):
        await client.request("GET", f"http://{name.lower()}.direct.example:9/")


async def test_a_proxy_never_gets_the_key_of_the_server_behind_it(
    server: Server, url: str, client: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", url)
    with pytest.raises(ConnectionFailed, match=r"^the proxy answered 407 No Key$"):
        await client.request("POST", "https://far.example/v1", {})
    (head,) = server.heads
    assert head.startswith("CONNECT far.example:443 ")
    assert "key" not in head


async def test_the_password_of_a_proxy_is_sent_but_never_shown(
    server: Server, url: str, client: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", url.replace("//", "//me:s3cret@"))
    with pytest.raises(ConnectionFailed) as caught:
        await client.request("GET", "https://far.example/v1")
    assert base64.b64encode(b"me:s3cret").decode() in server.heads[0]
    assert "s3cret" not in str(caught.value)


async def test_a_proxy_may_have_no_scheme_but_must_speak_http(
    url: str, client: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = url.removeprefix("http://")
    monkeypatch.setenv("ALL_PROXY", address)
    assert (await client.request("GET", "http://far.example/")).status == 200
    monkeypatch.setenv("ALL_PROXY", f"socks5://{address}")
    with pytest.raises(ConnectionFailed, match="a `socks5` proxy cannot be used"):
        await client.request("GET", "http://other.example/")


@pytest.mark.parametrize("direct", ["*", "other.example, *", "::1", "localhost,::1"])
def test_no_proxy_may_be_a_list_with_a_star_or_an_ipv6_address(
    monkeypatch: pytest.MonkeyPatch, direct: str
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", direct)
    assert _proxy("http", "[::1]:8000") is None
    assert (_proxy("http", "far.example") is None) == ("*" in direct)


async def test_credentials_in_a_url_replace_the_key(
    server: Server, url: str, client: HttpClient
) -> None:
    await client.request("GET", url.replace("//", "//me:p%40w@"))
    assert f"Basic {base64.b64encode(b'me:p@w').decode()}" in server.heads[0]
    assert "Bearer" not in server.heads[0]


async def test_a_path_with_spaces_is_quoted(url: str, client: HttpClient) -> None:
    response = await client.request("GET", f"{url}/a b/é%2F")
    assert response.json()["path"] == "/a%20b/%C3%A9%2F"


async def test_a_server_may_send_long_headers(url: str, client: HttpClient) -> None:
    assert (await client.request("GET", f"{url}/header")).status == 200


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("localhost:8000/v1", "must begin with `http://`"),
        ("/v1", "must begin with `http://`"),
        ("http://h:99999/v1", "out of range"),
        ("http://[::1/v1", "Invalid IPv6 URL"),
        ("http://a..b/v1", "label"),
    ],
)
async def test_a_url_that_cannot_be_used_is_an_error(
    client: HttpClient, target: str, message: str
) -> None:
    with pytest.raises(ConnectionFailed, match=message):
        await client.request("GET", target)


async def test_a_key_with_a_line_break_is_an_error(url: str) -> None:
    client = HttpClient(headers={"Authorization": "Bearer key\n"})
    with pytest.raises(ConnectionFailed, match="the request cannot be sent") as caught:
        await client.request("GET", url)
    assert "Bearer" not in str(caught.value)
    await client.aclose()


async def test_certificates_that_are_not_there_are_an_error(
    client: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/not/there")
    with pytest.raises(ConnectionFailed, match="`SSL_CERT_FILE`"):
        await client.request("GET", "https://127.0.0.1:9/")


async def test_a_server_that_never_reads_a_request_is_a_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = HttpClient(connect_timeout=0.1, read_timeout=0.1)
        with pytest.raises(ResponseTimeout):
            async with asyncio.timeout(20):
                port = listening.getsockname()[1]
                await client.request("POST", f"http://127.0.0.1:{port}/", {"x": "x" * (16 << 20)})
        await client.aclose()


async def test_a_proxy_that_stays_silent_fails_to_connect(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{listening.getsockname()[1]}")
        client = HttpClient(connect_timeout=0.1, read_timeout=30)
        with pytest.raises(ConnectionFailed, match="connecting took too long"):
            async with asyncio.timeout(20):
                await client.request("GET", "https://far.example/")
        await client.aclose()


async def test_a_thread_with_a_loop_of_its_own_can_use_the_same_client(
    server: Server, url: str, client: HttpClient
) -> None:
    for path in ("/1", "/2"):
        assert (await client.request("GET", f"{url}/main")).status == 200
        elsewhere = asyncio.to_thread(asyncio.run, client.request("GET", url + path))
        assert (await elsewhere).json()["path"] == path
    assert server.connections == 3  # the loop of this test keeps its own
