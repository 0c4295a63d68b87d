"""A server and a real worker process exchange calls and replies."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.processes.rpc import CHUNK
from trainer.processes.worker import (
    PARENT_VARIABLE,
    Worker,
    cause,
    environment_without_keys,
    open_log,
)
from trainer.server.app import _bind

ECHO = """
from trainer.processes.worker import serve

def lengths(groups, more):
    for group in groups:
        yield {"length": len(group["text"]), "more": more}

serve({"lengths": lengths, "add": lambda one, other: one + other})
"""
VARIABLES = """
import os
from trainer.processes.worker import serve

serve({"variables": lambda: dict(os.environ)})
"""


async def test_calls_of_any_size_arrive_complete_and_in_order(
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


def test_keys_stay_out_of_the_environment_of_children(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = ("ART_API_KEY", "OPENAI_API_KEY", "WANDB_API_KEY", "LANGFUSE_SECRET_KEY")
    needed = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_MODE", "CUDA_VISIBLE_DEVICES")
    for name in (*secret, *needed):
        monkeypatch.setenv(name, "x")
    found = environment_without_keys()
    assert not found.keys() & set(secret) and set(needed) <= found.keys()


async def test_openmp_threads_of_a_worker_spin_briefly_unless_the_user_has_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "variables_worker.py").write_text(VARIABLES)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    for name in names:
        monkeypatch.delenv(name, raising=False)

    async def variables(**given: str) -> dict[str, str]:
        worker = Worker(
            "w", "variables_worker", [], log=tmp_path / "log", environment={"ART_X": "given"}
        )
        with monkeypatch.context() as patch:
            for name, value in given.items():
                patch.setenv(name, value)
            await worker.start()
        try:
            found = await worker.call("variables")
        finally:
            await worker.stop()
        assert found["ART_X"] == "given"
        return {name: found[name] for name in names if name in found}

    assert await variables() == {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}
    for name in names:
        assert await variables(**{name: "7"}) == {name: "7"}


def test_a_process_dies_even_if_its_parent_died_before_it_checked() -> None:
    code = "import signal; from trainer.processes.worker import *; die_with_parent(signal.SIGKILL)"

    def ends_with(parent: int) -> int:
        environment = {**os.environ, PARENT_VARIABLE: str(parent)}
        return subprocess.run([sys.executable, "-c", code], env=environment).returncode

    assert ends_with(os.getpid()) == 0
    assert ends_with(os.getppid()) == -signal.SIGKILL


def test_a_bound_socket_knows_its_protocol() -> None:
    """Otherwise asyncio does not disable Nagle's algorithm, which delays a response by 40 ms."""
    with _bind("127.0.0.1", 0) as bound:
        assert bound.proto == socket.IPPROTO_TCP


def test_a_log_that_cannot_be_written_does_not_keep_a_process_from_starting(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file in the way")
    with open_log(tmp_path / "logs" / "engine.log") as log:
        log.write(b"lost")
    assert cause(tmp_path / "logs" / "engine.log") == "its log is empty"
