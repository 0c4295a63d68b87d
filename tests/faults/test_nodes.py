"""A server over two machines: whoever is killed, the run goes on where it was."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.processes import child, children, wait_until_gone
from tests.serving import Serving, free_port
from trainer.learner.process import MODULE

BASE = "tiny-random"
MODEL = {"name": "run", "project": "nodes", "base_model": BASE}
KEY = "sesame"


@contextmanager
def node(directory: Path, port: int) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-m", "trainer", "engine", "--node-dir", str(directory)]
    with subprocess.Popen(
        [*command, "--head", f"http://127.0.0.1:{port}"],
        env={**os.environ, "ART_API_KEY": KEY, "OMP_NUM_THREADS": "1"},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def train(serving: Serving, step: int) -> None:
    serving.post("/register", MODEL)
    serving.post("/_prepare_backend_for_training", {"model": MODEL})
    trajectories: list[dict[str, Any]] = []
    for number in range(4):
        tokens = [(7 * step + 11 * number + place) % 200 + 20 for place in range(6)]
        choice = {
            "finish_reason": "stop",
            "index": 0,
            "message": {"role": "assistant", "content": "?"},
            "logprobs": {"content": [{"token": f"token_id:{t}", "logprob": -5.0} for t in tokens]},
        }
        said = [{"role": "user", "content": f"scenario {step}"}, choice]
        trajectories.append({"messages_and_choices": said, "reward": float(number)})
    body = {
        "model": MODEL,
        "trajectory_groups": [{"trajectories": trajectories}],
        "config": {"learning_rate": 1e-3},
    }
    httpx.post(f"{serving.control}/_train_model", json=body, timeout=300).raise_for_status()
    assert serving.post("/_get_step", MODEL) == step


def wait_for(log: Path, text: str, times: int) -> None:
    while log.read_text().count(text) < times:
        time.sleep(0.1)


def learner(process: "subprocess.Popen[bytes]") -> list[int]:
    """torchrun's agent, a child of `process`, and what it has started."""
    agent = child(process.pid, MODULE)
    return [agent, *children(agent)]


def test_learners_and_a_head_that_are_killed_are_joined_again(tmp_path: Path) -> None:
    port = free_port()
    arguments = ("--nodes", "2", "--nodes-host", "127.0.0.1", "--nodes-port", str(port))
    serving = Serving(tmp_path / "head", BASE, *arguments, ART_API_KEY=KEY)
    with node(tmp_path / "node", port) as other, serving:
        train(serving, 1)
        _, rank = learner(other)
        os.kill(rank, signal.SIGKILL)
        train(serving, 2)  # the learner here left the broken world, and a new one was met
        agent, rank = learner(serving.process)
        os.kill(agent, signal.SIGKILL)
        wait_until_gone([rank])
        train(serving, 3)
        wait_for(serving.log, "is ready; replicas: 2", 1)
        here = learner(serving.process)
        serving.process.kill()
        serving.process.wait()
        wait_until_gone(here)
        serving.start()
        train(serving, 4)
        wait_for(serving.log, "is ready; replicas: 2", 2)
        assert other.poll() is None
        everyone = [*learner(serving.process), *learner(other)]
        assert len(everyone) == 4
        serving.process.terminate()
        assert serving.process.wait(120) == 0
        assert other.wait(120) == 0  # sent home
        wait_until_gone(everyone)
