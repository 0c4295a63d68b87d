"""No vLLM process outlives the server, however the server ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# A server that starts a program through the group leader; the program's child ignores SIGTERM.
SERVER = """
import subprocess, sys, time
program = "(trap '' TERM; exec sleep 300) & echo $! > child; mv child started; wait"
leader = [sys.executable, "-m", "trainer.processes.process_group", "bash", "-c", program]
process = subprocess.Popen(leader, start_new_session=True)
open("leader", "w").write(str(process.pid))
time.sleep(300)
"""


def wait_until(condition: object) -> None:
    while not condition():  # type: ignore[operator]
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # it may end while the file is being read
        return False
    return state != "Z"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("ending", ["server killed", "server terminated", "leader terminated"])
def test_the_whole_group_ends_with_the_server(tmp_path: Path, ending: str) -> None:
    server = subprocess.Popen([sys.executable, "-c", SERVER], cwd=tmp_path)
    try:
        wait_until((tmp_path / "started").exists)
        grandchild = int((tmp_path / "started").read_text())
        assert is_alive(grandchild)
        if ending == "leader terminated":
            os.kill(int((tmp_path / "leader").read_text()), signal.SIGTERM)
        else:
            server.send_signal(signal.SIGKILL if "killed" in ending else signal.SIGTERM)
        wait_until(lambda: not is_alive(grandchild))
    finally:
        server.kill()
        server.wait()


@pytest.mark.timeout(60)
def test_processes_that_the_program_leaves_behind_end_with_it() -> None:
    program = "(trap '' TERM; exec sleep 300) & echo $!; exit 3"
    command = [sys.executable, "-m", "trainer.processes.process_group", "bash", "-c", program]
    leader = subprocess.run(command, start_new_session=True, capture_output=True, text=True)
    assert "ended with code 3" in leader.stderr
    wait_until(lambda: not is_alive(int(leader.stdout)))
