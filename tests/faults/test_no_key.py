"""Without its key, a server that listens on a network answers nothing but its health."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving import Serving
from trainer.server.guard import OPEN_PATHS

KEY = "the-key-of-this-test"
# Sends every request from the network of another machine, and prints the statuses.
CLIENT = """
import http.client, json, sys
statuses = []
for host, port, method, path, headers in json.load(sys.stdin):
    connection = http.client.HTTPConnection(host, port, timeout=60)
    connection.request(method, path, body="{}" if method == "POST" else None, headers=headers)
    answer = connection.getresponse()
    statuses.append([answer.status, answer.read(2000).decode(errors="replace")])
    connection.close()
json.dump(statuses, sys.stdout)
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def network() -> Iterator[tuple[str, str]]:
    """A network namespace, and the address of this machine in the network that it shares."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to create a network")
    number = os.getpid() % 250 + 1
    space, inner, outer = f"art{os.getpid()}", f"ai{os.getpid()}", f"ao{os.getpid()}"
    ip("netns", "add", space)
    try:
        ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", space)
        ip("addr", "add", f"10.213.{number}.1/30", "dev", outer)
        ip("link", "set", outer, "up")
        ip("-n", space, "addr", "add", f"10.213.{number}.2/30", "dev", inner)
        ip("-n", space, "link", "set", inner, "up")
        yield space, f"10.213.{number}.1"
    finally:
        ip("netns", "del", space)  # takes both ends along


def from_elsewhere(space: str, requests: list[Any]) -> list[Any]:
    done = subprocess.run(
        ["ip", "netns", "exec", space, sys.executable, "-c", CLIENT],
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    answers: list[Any] = json.loads(done.stdout)
    return answers


def test_every_route_needs_the_key_on_both_ports(network: tuple[str, str], tmp_path: Path) -> None:
    space, host = network
    with Serving(tmp_path, "tiny-random", host=host, ART_API_KEY=KEY) as server:
        right = {"Authorization": f"Bearer {KEY}"}
        document = httpx.get(f"{server.control}/openapi.json", headers=right).json()
        routes = [
            (method.upper(), path.replace("{", "").replace("}", ""))
            for path, methods in document["paths"].items()
            for method in methods
        ]
        # What FastAPI serves by itself or the document leaves out, and paths that nobody serves.
        routes += [("GET", path) for path in ("/openapi.json", "/docs", "/redoc", "/", "/nowhere")]
        routes += [("HEAD", "/v1/models"), ("OPTIONS", "/v1/models"), ("PUT", "/v1/models")]
        routes += [("GET", path) for path in ("//health", "/health/", "/health/../metrics")]
        routes += [("GET", "/v1/models?key=" + KEY), ("GET", "/HEALTH"), ("GET", "/health%2f")]
        assert len(routes) > 40
        ports = [int(address.rpartition(":")[2]) for address in (server.control, server.openai)]
        wrong: list[dict[str, str]] = [
            {},
            {"Authorization": KEY},
            {"Authorization": "Bearer "},
            {"Authorization": f"Bearer {KEY}x"},
            {"x-api-key": ""},
            {"X-Forwarded-For": "127.0.0.1", "Host": "127.0.0.1"},
        ]
        # All routes without a key, and one route with each kind of wrong key.
        requests = [[host, port, *route, {}] for port in ports for route in routes]
        requests += [[host, port, "GET", "/v1/models", it] for port in ports for it in wrong]
        answers = from_elsewhere(space, requests)
        for (_, port, method, path, headers), (status, body) in zip(requests, answers, strict=True):
            expected = 200 if path in OPEN_PATHS else 401
            assert status == expected, (port, method, path, headers, body)
            assert KEY not in body
        assert {path for _, path in routes} >= OPEN_PATHS
        ((status, _),) = from_elsewhere(space, [[host, ports[1], "GET", "/v1/models", right]])
        assert status == 200
