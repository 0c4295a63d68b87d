"""The addresses of a server, and checks of its health."""

import contextlib
import http.client
import json
import time
from dataclasses import dataclass

from launcher.errors import ProviderError


@dataclass(frozen=True)
class Endpoints:
    """The addresses of a server on this machine."""

    control: str
    openai: str

    @classmethod
    def on_loopback(cls, port: int, openai_port: int) -> "Endpoints":
        return cls(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{openai_port}/v1")

    def exports(self) -> dict[str, str]:
        return {"ART_BASE_URL": self.control, "OPENAI_BASE_URL": self.openai}


def is_healthy(endpoints: Endpoints) -> bool:
    """Whether both ports answer."""
    return all(
        _answers(address) for address in (endpoints.control, endpoints.openai.removesuffix("/v1"))
    )


def _answers(address: str) -> bool:
    # Called several times a second while a server starts, so it uses the cheapest client.
    # Proxy settings of the environment do not apply, because the address is loopback.
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=10)
    with contextlib.closing(connection):
        try:
            connection.request("GET", "/health")
            return 200 <= connection.getresponse().status < 300
        except (OSError, http.client.HTTPException):
            return False


def page_link(endpoints: Endpoints, key: str | None) -> str | None:
    """The address of the server's page; None if it has none.

    Where the server asks for a key, the address has a token that works once: a key in an address
    would end up in histories and logs.
    """
    address = f"{endpoints.control}/"
    status, _ = request(endpoints.control, "GET", "/")
    if status == 401 and key:
        status, body = request(endpoints.control, "POST", "/api/login-token", key)
        if status != 200:
            return None
        return f"{address}?token={json.loads(body)['token']}"
    return address if status in (200, 401) else None


def request(address: str, method: str, path: str, key: str | None = None) -> tuple[int, bytes]:
    """The status and body of an answer; status 0 if there is none."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=10)
    with contextlib.closing(connection):
        try:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException):
            return 0, b""


def wait_until_healthy(
    endpoints: Endpoints, cluster: str, option: str, patience: float = 60.0
) -> None:
    """Return as soon as the server answers; raise if it does not within `patience` seconds."""
    deadline = time.monotonic() + patience
    while not is_healthy(endpoints):
        if time.monotonic() > deadline:
            raise ProviderError(
                f"The server of cluster `{cluster}` does not answer",
                hint=f"Read its log with `launcher logs server{option} -c {cluster}`",
            )
        time.sleep(1)


def wait_while_healthy(endpoints: Endpoints, cluster: str, option: str) -> None:
    """Wait until Ctrl-C; raise if the server stops answering."""
    while True:
        time.sleep(30)
        wait_until_healthy(endpoints, cluster, option)
