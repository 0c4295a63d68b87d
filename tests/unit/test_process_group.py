"""No process of vLLM outlives the server, however that ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# A server that starts, through the leader, a program with a child of its own that ignores SIGTERM.
SERVER = """
import subprocess, sys, time
program = "(trap '' TERM; exec sleep 300) & echo $! > child; mv child started; wait"
leader = [sys.executable, "-m", "trainer.processes.process_group", "bash", "-c", program]
process = subprocess.Popen(leader, start_new_session=True)
open("leader", "w").write(str(process.pid))
time.sleep(300)
"""


def until(condition: object) -> None:
    while not condition():  # type: ignore[operator]
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # also when it ends while it is read
        return False
    return state != "Z"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("ending", ["server killed", "server terminated", "leader terminated"])
def test_the_whole_group_ends_with_the_server(tmp_path: Path, ending: str) -> None:
    server = subprocess.Popen([sys.executable, "-c", SERVER], cwd=tmp_path)
    try:
        until((tmp_path / "started").exists)
        grandchild = int((tmp_path / "started").read_text())
        assert is_alive(grandchild)
        if ending == "leader terminated":
            os.kill(int((tmp_path / "leader").read_text()), signal.SIGTERM)
        else:
            server.send_signal(signal.SIGKILL if "killed" in ending else signal.SIGTERM)
        until(lambda: not is_alive(grandchild))
    finally:
        server.kill()
        server.wait()


@pytest.mark.timeout(60)
def test_what_the_program_leaves_behind_ends_with_it() -> None:
    program = "(trap '' TERM; exec sleep 300) & echo $!; exit 3"
    command = [sys.executable, "-m", "trainer.processes.process_group", "bash", "-c", program]
    leader = subprocess.run(command, start_new_session=True, capture_output=True, text=True)
    assert "ended with code 3" in leader.stderr
    until(lambda: not is_alive(int(leader.stdout)))
