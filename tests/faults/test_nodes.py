"""A server over two machines of a Ray cluster: whoever is killed, the run goes on where it was."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx

from tests.processes import child, children, wait_until_gone
from tests.ray_cluster import ACTOR, ENGINE, KEY, RayHosts
from tests.serving import Serving, free_port
from trainer.learner.process import MODULE

BASE = "tiny-random"
MODEL = {"name": "run", "project": "nodes", "base_model": BASE}


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


def learner(process: int) -> list[int]:
    """torchrun's agent, a child of `process`, and what it has started."""
    agent = child(process, MODULE)
    return [agent, *children(agent)]


def test_learners_actor_and_server_that_are_killed_are_joined_again(tmp_path: Path) -> None:
    with RayHosts(tmp_path / "hosts") as hosts:
        other = hosts.join()
        port = str(free_port())
        arguments = ("--ray", hosts.address, "--nodes", "2", "--learner-port", port)
        with Serving(tmp_path / "head", BASE, *arguments, ART_API_KEY=KEY) as serving:
            train(serving, 1)
            actor = hosts.pid(other, ACTOR)
            _, rank = learner(actor)
            os.kill(rank, signal.SIGKILL)
            train(serving, 2)  # the learner here left the broken world, and a new one was met
            agent, rank = learner(serving.process.pid)
            os.kill(agent, signal.SIGKILL)
            wait_until_gone([rank])
            train(serving, 3)
            wait_for(serving.log, "is ready; replicas: 2", 1)
            engine = hosts.pid(other, ENGINE)
            here = learner(serving.process.pid)
            serving.process.kill()
            serving.process.wait()
            wait_until_gone(here)
            serving.start()
            train(serving, 4)
            wait_for(serving.log, "is ready; replicas: 2", 2)
            assert [hosts.pid(other, name) for name in (ACTOR, ENGINE)] == [actor, engine]
            os.kill(actor, signal.SIGKILL)
            wait_until_gone([actor, engine])
            train(serving, 5)
            wait_for(serving.log, "is ready; replicas: 2", 3)
            everyone = [*learner(serving.process.pid), *learner(hosts.pid(other, ACTOR))]
            assert len(everyone) == 4
            everyone.append(hosts.pid(other, ENGINE))
            serving.process.terminate()
            assert serving.process.wait(120) == 0
            wait_until_gone(everyone)
