"""Runs of a local cluster are told apart from other processes, and servers from other programs."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.errors import ProviderError
from launcher.local.provider import LocalProvider
from launcher.local.runs import read_run, start_time
from launcher.provider import RunStatus
from launcher.settings import Settings
from launcher.task import Task
from tests.serving import free_port

SLEEP = "run: sleep 60\n"


def launch(tmp_path: Path, *ports: int) -> LocalProvider:
    (tmp_path / "work").mkdir(exist_ok=True)
    task = tmp_path / "task.yaml"
    envs = dict(zip(("ART_PORT", "ART_OPENAI_PORT"), ports, strict=False))
    lines = "".join(f"  {name}: {port}\n" for name, port in envs.items())
    task.write_text(f"workdir: {tmp_path / 'work'}\nenvs:\n{lines}{SLEEP}")
    provider = LocalProvider(tmp_path / "clusters")
    provider.launch("art", Task.load(task, Settings()), [])
    return provider


def test_a_run_is_alive_in_every_time_zone_and_without_its_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = launch(tmp_path, free_port(), free_port())
    directory = tmp_path / "clusters/art/runs/1"
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    assert read_run(directory).status is RunStatus.RUNNING
    pid, _, started = (directory / "pid").read_text().partition(" ")
    assert started == start_time(int(pid))
    (directory / "pid").write_text(f"{pid}\n")  # as its shell writes it
    assert read_run(directory).status is RunStatus.RUNNING
    (directory / "pid").write_text(f"{pid} another start")
    assert read_run(directory).status is RunStatus.CANCELLED
    (directory / "pid").write_text(f"{pid} {started}")
    provider.down("art")
    assert start_time(int(pid)) == ""


def test_processes_have_different_start_times_and_dead_ones_have_none() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert start_time(process.pid) not in ("", start_time(os.getpid()))
        assert process.stdin is not None
        process.stdin.close()
    assert start_time(process.pid) == ""


def test_a_port_where_another_program_listens_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ProviderError, match=f"Another program listens on port {port}"):
            launch(tmp_path, port, free_port())
    assert not (tmp_path / "clusters").exists()
