"""The server's end and a worker's end of a channel, with a real process between them."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.processes.rpc import CHUNK
from trainer.processes.worker import PARENT_VARIABLE, Worker
from trainer.server.app import _bind

ECHO = """
from trainer.processes.worker import serve

def lengths(groups, more):
    for group in groups:
        yield {"length": len(group["text"]), "more": more}

serve({"lengths": lengths, "add": lambda one, other: one + other})
"""


async def test_calls_of_any_size_arrive_whole_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "echo_worker.py").write_text(ECHO)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    worker = Worker("echo", "echo_worker", [], log=tmp_path / "log")
    await worker.start()
    try:
        sizes = [3 * CHUNK, 0, 1, CHUNK]
        groups = [{"text": "é" * size} for size in sizes]
        rows = [row async for row in worker.stream("lengths", groups=groups, more=[1, "\n"])]
        assert rows == [{"length": size, "more": [1, "\n"]} for size in sizes]
        assert await worker.call("add", one=2, other=3) == 5
        assert [row async for row in worker.stream("lengths", groups=[], more=None)] == []
    finally:
        await worker.stop()


def test_a_process_whose_parent_is_gone_already_dies_as_if_it_had_seen_it() -> None:
    code = "import signal; from trainer.processes.worker import *; die_with_parent(signal.SIGKILL)"

    def ends_with(parent: int) -> int:
        environment = {**os.environ, PARENT_VARIABLE: str(parent)}
        return subprocess.run([sys.executable, "-c", code], env=environment).returncode

    assert ends_with(os.getpid()) == 0
    assert ends_with(os.getppid()) == -signal.SIGKILL


def test_a_bound_socket_names_its_protocol() -> None:
    """Only then does asyncio switch Nagle's algorithm off, which costs 40 ms an answer."""
    with _bind("127.0.0.1", 0) as bound:
        assert bound.proto == socket.IPPROTO_TCP
