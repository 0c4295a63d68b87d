"""More than one machine, and machines that are lost, on a real Slurm through SkyPilot.

Three stories on one lab: the second GPU in line is taken when the first is not free; two machines
sample and train as one, also when one of them is killed; and a managed run outlives its cluster.
The GPUs of the lab are declared, not real.

Not collected with the others yet: on a busy machine two of the three ran out of their time.

    pytest tests/e2e/several_machines.py
"""

import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

LAB = Path("/tmp/art-slurm-lab")
LAUNCHER = ".venv/bin/launcher"
# Stands for the server where only the choice of a machine is shown: it answers on both ports.
STUB = """
setup: mkdir -p ~/sky_workdir && echo ok >~/sky_workdir/health
run: |
  python3 -m http.server --bind 127.0.0.1 $ART_PORT &
  exec python3 -m http.server --bind 127.0.0.1 $ART_OPENAI_PORT
"""
# Runs what the laptop has installed: a managed run gets two clusters, and setup is shown elsewhere.
MANAGED = """
name: managed
resources: {{cpus: 2, memory: 4}}
envs: {{BASE_MODEL: tiny-random}}
run: |
  {clone}/.venv/bin/trainer serve --engine embedded --port $ART_PORT --openai-port $ART_OPENAI_PORT
"""
# The controller of managed runs lives in the API server of the laptop. Before it replaces a lost
# cluster SkyPilot asks two public addresses whether the network is there; the lab has only itself.
CONTROLLER = """
printf 'jobs: {{controller: {{consolidation_mode: true}}}}\\n' >>~/.sky/config.yaml
sed -i "s#^_TEST_IP_LIST = .*#_TEST_IP_LIST = ['http://127.0.0.1:46599/api/health']#" \
  .venv/lib/python3.*/site-packages/sky/backends/backend_utils.py
.venv/bin/sky api stop || true
"""
PYTHON = "LITELLM_LOCAL_MODEL_COST_MAP=True {clone}/.venv/bin/python {clone}/tests/e2e"
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def laptop(slurm_laptop: Any) -> Any:
    slurm_laptop.run("scripts/install")
    slurm_laptop.run(CONTROLLER.format())
    slurm_laptop.clone.parent.chmod(0o755)  # the account may run what the laptop installed
    return slurm_laptop


def slurm(*command: str) -> str:
    environment = {**os.environ, "SLURM_CONF": str(LAB / "slurm/slurm.conf")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def jobs(name: str) -> list[str]:
    """Name, GPUs and nodes of the Slurm jobs of a cluster."""
    listed = slurm("squeue", "--noheader", "--states=R", "--format=%j %b %N").splitlines()
    return [line for line in listed if line.startswith(name)]


def until(condition: Callable[[], Any], seconds: float, told: Callable[[], str] = str) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, told()
        time.sleep(1)
    return found


def test_an_h100_that_is_taken_is_followed_by_an_a100(laptop: Any) -> None:
    task = (laptop.clone / "sky/art.yaml").read_text()
    # All of the task but what needs the GPU itself.
    task = re.sub(r"(?ms)^(setup|run|workdir):.*?(?=^\S|\Z)", "", task)
    (laptop.clone / "stub.yaml").write_text(task + STUB)
    hold = ["srun", "--gres=gpu:H100:1", "--mem=100", "--job-name=holder", "sleep", "600"]
    environment = {**os.environ, "SLURM_CONF": str(LAB / "slurm/slurm.conf")}
    with subprocess.Popen(hold, env=environment, stderr=subprocess.DEVNULL) as holder:
        try:
            until(lambda: jobs("holder"), 60)
            laptop.run("./launch-cluster.sh --infra slurm/lab -c failover stub.yaml --cpus 2")
            (job,) = jobs("failover-")
            assert "gpu:A100-80GB:1" in job and job.endswith(" art-n2"), job
        finally:
            slurm("scancel", "--name=holder")
            holder.wait()
            laptop.run(f"{LAUNCHER} down -c failover --discard --yes")


def test_two_machines_sample_and_train_as_one_and_a_killed_one_loses_no_request(
    laptop: Any,
) -> None:
    python = PYTHON.format(clone=laptop.clone)
    overrides = {"ENGINE": "embedded", "BASE_MODEL": "tiny-random", "NODES_PORT": free_port()}
    overrides |= {"ENGINE_DEVICES": "", "LEARNER_DEVICES": ""}
    envs = " ".join(f"--env {name}={value}" for name, value in overrides.items())
    laptop.run(
        f"./launch-cluster.sh sky/art-multi-node.yaml --gpus none --cpus 4 --memory 8 {envs}"
    )

    def server() -> str:
        return str(laptop.run(f"{LAUNCHER} logs server --no-follow"))

    (job,) = jobs("art-")
    assert job.endswith(" art-n[1-2]"), job
    until(lambda: server().count("serves, one of 2 replicas") == 1, 120, server)
    with laptop.tunnel() as exports:
        laptop.run(f"{exports}; {python}/train_until.py tiny 2 0")
        rollouts = laptop.start(f"{exports}; {python}/roll_out.py tiny 16 800")
        engine = until(lambda: node_engine() if busy(node_engine()) else None, 120)
        os.kill(parent(engine), signal.SIGKILL)  # `trainer engine` itself, and so its engine
        told = json.loads(laptop.finish(rollouts))
        assert told == {"answers": 16, "choices": 64, "finished": 64}
        assert re.search(r"`art-n2` is lost with [1-9]\d* choices under way", server())
        until(lambda: server().count("serves, one of 2 replicas") == 2, 120, server)
        # The learner's world was broken by that too, and is whole again.
        laptop.run(f"{exports}; {python}/train_until.py tiny 3 0")
    learner = laptop.run("ssh -q art cat sky_workdir/.art/nodes/art-n2/logs/learner.log")
    assert learner.count("process 1 of 2 has joined") == 2
    history = laptop.run("ssh -q art cat sky_workdir/.art/e2e/models/tiny/history.jsonl")
    rows = [json.loads(line) for line in history.splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["loss/grad_norm"] > 0 for row in rows)
    assert all(row["canary/logprob_difference"] < 1e-3 for row in rows)
    laptop.run(f"{LAUNCHER} down --yes")
    assert not jobs("art-")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.11", 0))
        return int(probe.getsockname()[1])


def node_engine() -> int:
    """The process that samples on the second machine: the child of `trainer engine`."""
    (pid,) = subprocess.run(
        ["pgrep", "--uid", "arthpc", "--full", "trainer engine --head"],
        capture_output=True, text=True, check=True,
    ).stdout.split()[-1:]  # fmt: skip
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    (engine,) = [
        it for it in listed if "embedded_worker" in Path(f"/proc/{it}/cmdline").read_text()
    ]
    return int(engine)


def busy(pid: int) -> bool:
    """Whether a process computes now: its time on the CPU grows."""

    def ticks() -> int:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11])

    before = ticks()
    time.sleep(0.2)
    return ticks() > before + 2


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def test_a_managed_run_that_slurm_cancels_goes_on_from_its_last_checkpoint(laptop: Any) -> None:
    (laptop.clone / "managed.yaml").write_text(MANAGED.format(clone=laptop.clone))
    state = LAB / "home/arthpc/state"  # the account's own home, which every cluster of it sees
    checkpoints = state / "e2e/models/kept/checkpoints"
    (laptop.clone / ".env").chmod(0o644)  # ART's client reads the one above its own files
    command = f"{PYTHON.format(clone=laptop.clone)}/train_until.py kept 6 5"
    laptop.run(f"{LAUNCHER} run --managed --task managed.yaml --state-dir {state} '{command}'")

    def queue() -> str:
        return str(laptop.run(".venv/bin/sky jobs queue --all"))

    until((checkpoints / "0002/manifest.json").exists, 240, queue)
    (job,) = jobs("managed-")
    slurm("scancel", f"--name={job.split()[0]}")
    before = hashes(checkpoints)
    assert not (checkpoints / "0006").exists()
    until((checkpoints / "0006/manifest.json").exists, 420, queue)
    until(lambda: "SUCCEEDED" in queue(), 120, queue)
    after = hashes(checkpoints)
    assert {path: after[path] for path in before} == before
    history = (state / "e2e/models/kept/history.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in history] == [1, 2, 3, 4, 5, 6]


def hashes(checkpoints: Path) -> dict[str, str]:
    """Of every file of a whole checkpoint."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in checkpoints.glob("[0-9]*/*")
    }
