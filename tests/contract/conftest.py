"""A real `trainer serve` on loopback, with its real engine and learner, for the contract tests."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest


@dataclass(frozen=True)
class Server:
    control: str
    openai: str
    state: Path
    process: subprocess.Popen[bytes]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("server")
    control, openai = free_port(), free_port()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("ART_")},
        "ART_CACHE": str(tmp_path_factory.getbasetemp() / "art-cache"),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        *(sys.executable, "-m", "trainer", "serve", "--base-model", "tiny-random"),
        *("--port", str(control), "--openai-port", str(openai)),
        *("--state-dir", str(directory / ".art")),
    ]
    with (directory / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=directory, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    server = Server(
        f"http://127.0.0.1:{control}", f"http://127.0.0.1:{openai}", directory / ".art", process
    )
    try:
        _wait_until_served(server, directory / "server.log")
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def _wait_until_served(server: Server, log: Path) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            break
        try:
            if httpx.get(f"{server.openai}/v1/models").json()["data"]:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"the server did not come up: {log.read_text()}")
