"""More than one machine, and machines that are lost, on a real Slurm through SkyPilot.

Three stories on one lab: the second GPU in line is taken when the first is not free; two machines
sample and train as one, also when one of them is killed; and a managed run outlives its cluster.
The GPUs of the lab are declared, not real.

Each story has ports of its own, and ends what it started also when it fails. It waits for as long
as something happens, since the machine that plays all of this may be a busy one.
"""

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import environment

LAB = Path("/tmp/art-slurm-lab")
LAUNCHER = ".venv/bin/launcher"
# Runs what the laptop has installed: a managed run gets two clusters, and setup is shown elsewhere.
MANAGED = """
name: managed
resources: {{cpus: 2, memory: 4}}
envs: {{BASE_MODEL: tiny-random}}
run: |
  {clone}/.venv/bin/trainer serve --engine embedded --port $ART_PORT --openai-port $ART_OPENAI_PORT
"""
PYTHON = "LITELLM_LOCAL_MODEL_COST_MAP=True {clone}/.venv/bin/python {clone}/tests/e2e"
WORLD = ("TORCHELASTIC_RUN_ID", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SERVES = "is ready; replicas: 2"
ACTOR, SERVER = "ray::", "\0serve\0"
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture
def laptop(slurm_laptop: Any) -> Iterator[Any]:
    slurm_laptop.take_ports()
    slurm_laptop.clone.parent.chmod(0o755)  # the account may run what the laptop installed
    yield slurm_laptop
    if jobs(""):  # the story broke off
        slurm_laptop.run(".venv/bin/sky jobs cancel --all --yes || true")
        slurm_laptop.run(".venv/bin/sky down --all --yes || true")
        slurm("scancel", "--user=arthpc")
        until(lambda: not jobs(""), lambda: str(jobs("")))


def slurm(*command: str) -> str:
    environment = {**os.environ, "SLURM_CONF": str(LAB / "slurm/slurm.conf")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def jobs(name: str) -> list[str]:
    """Name, GPUs and nodes of the Slurm jobs of a cluster."""
    listed = slurm("squeue", "--noheader", "--format=%j %b %N").splitlines()
    return [line for line in listed if line.startswith(name)]


def until(
    condition: Callable[[], Any], progress: Callable[[], str], told: Callable[[], str] = str
) -> Any:
    """Wait for `condition` for as long as `progress` tells something new within five minutes."""
    seen, since = progress(), time.monotonic()
    while not (found := condition()):
        if (now := progress()) != seen:
            seen, since = now, time.monotonic()
        assert time.monotonic() < since + 300, seen + told()
        time.sleep(1)
    return found


def test_an_h100_that_is_taken_is_followed_by_an_a100_and_half_a_cluster_goes_too(
    laptop: Any,
) -> None:
    task = (laptop.clone / "sky/art.yaml").read_text()
    # Where it runs is shown, not what: that needs the GPU itself.
    task = re.sub(r"(?ms)^(setup|run|workdir):.*?(?=^\S|\Z)", "", task)
    (laptop.clone / "stub.yaml").write_text(f"{task}\nrun: sleep 1800\n")
    hold = ["srun", "--gres=gpu:H100:1", "--mem=100", "--job-name=holder", "sleep", "1800"]
    environment = {**os.environ, "SLURM_CONF": str(LAB / "slurm/slurm.conf")}
    with subprocess.Popen(hold, env=environment, stderr=subprocess.DEVNULL) as holder:
        try:
            until(lambda: "art-n1" in str(jobs("holder")), lambda: str(jobs("")))
            launch = laptop.start("./launch-cluster.sh --infra slurm/lab -c failover stub.yaml")
            until(lambda: " art-n" in str(jobs("failover-")), lambda: str(jobs("")))
            (job,) = jobs("failover-")
        finally:
            slurm("scancel", "--name=holder")
            holder.wait()
    assert "gpu:A100-80GB:1" in job and job.endswith(" art-n2"), job
    laptop.run(f"{LAUNCHER} down -c failover --discard --yes")
    until(lambda: not jobs("failover-"), lambda: str(jobs("")))
    _, err = launch.communicate()
    assert launch.returncode == 1 and "\nerror: " in err, err


def test_two_machines_sample_and_train_as_one_and_a_killed_one_loses_no_request(
    laptop: Any,
) -> None:
    python = PYTHON.format(clone=laptop.clone)
    learner_port, ray_port = laptop.free_ports()
    overrides = {"ENGINE": "embedded", "LEARNER_PORT": learner_port, "RAY_PORT": ray_port}
    overrides |= {"BASE_MODEL": "tiny-random"}
    envs = " ".join(f"--env {name}={value}" for name, value in overrides.items())
    launch = f"./launch-cluster.sh sky/art-multi-node.yaml --gpus none --cpus 4 --memory 8 {envs}"
    try:
        laptop.run(launch)
    except AssertionError as error:  # the log goes with the cluster
        raise AssertionError(f"{error}\n{server_log()}") from None
    (job,) = jobs("art-")
    assert job.endswith(" art-n[1-2]"), job
    until(lambda: server_log().count(SERVES) >= 1, server_log)
    with laptop.tunnel() as exports:
        laptop.run(f"{exports}; {python}/train_until.py tiny 2 0")
        places = [environment(pid) for pid in running("trainer.learner.worker")]
        places = [place for place in places if "SKYPILOT_NODE_RANK" in place]
        # torchrun's agent on each machine started its own part of one world.
        assert sorted(place["SKYPILOT_NODE_RANK"] for place in places) == ["0", "1"]
        assert all(place["GROUP_RANK"] == place["SKYPILOT_NODE_RANK"] for place in places)
        (world,) = {tuple(place[name] for name in WORLD) for place in places}
        assert world[:2] == ("learner", "2"), world
        engine = engine_of(ACTOR)
        idle = ticks(engine)
        rollouts = laptop.start(f"{exports}; {python}/roll_out.py tiny 16 200 {laptop.clone}")
        try:
            # It samples: two tenths of a second of a CPU are more than a heartbeat takes.
            until(lambda: ticks(engine) > idle + 20, lambda: f"{rollouts.poll()}\n{server_log()}")
            served = server_log().count(SERVES)
            os.kill(parent(engine), signal.SIGKILL)  # the actor, and so its engine
            until(lambda: "is lost with" in server_log(), server_log)
            (laptop.clone / "calm").touch()
            # Ray starts the actor again, and a third machine comes and goes.
            until(lambda: server_log().count(SERVES) > served, server_log)
            laptop.run(f"{LAUNCHER} up --workers 1")
            until(lambda: "is ready; replicas: 3" in server_log(), server_log)
            laptop.run(f"{LAUNCHER} up --workers 0")
            until(lambda: "has left the cluster" in server_log(), server_log)
        finally:
            (laptop.clone / "enough").touch()
            told = json.loads(laptop.finish(rollouts))
        assert told["answers"] >= 16
        assert told["choices"] == told["finished"] == 4 * told["answers"]
        # A server that is killed comes back to the engines of the other machine.
        engine, served = engine_of(ACTOR), server_log().count(SERVES)
        os.kill(parent(engine_of(SERVER)), signal.SIGKILL)
        until(lambda: server_log().count(SERVES) > served, server_log)
        assert engine_of(ACTOR) == engine
        # The learner's world was broken by that too, and is whole again.
        laptop.run(f"{exports}; {python}/train_until.py tiny 3 0")
    # A run is where the server is. It has to be the right machine more than once.
    for _ in range(2):
        told = laptop.run(f"{LAUNCHER} run --wait 'echo runs on $SLURMD_NODENAME'")
        assert re.findall(r"runs on (\S+)", told) == ["art-n1"], told
    server = laptop.run(f"{LAUNCHER} logs server --no-follow")
    assert re.search(r"`art-n2` is lost with [1-9]\d* choices under way", server), server
    learner = laptop.run("ssh -q art cat 'sky_workdir/.art/nodes/art-n2-*/logs/learner.log'")
    assert learner.count("process 1 of 2 has joined") >= 2
    history = laptop.run("ssh -q art cat sky_workdir/.art/e2e/models/tiny/history.jsonl")
    rows = [json.loads(line) for line in history.splitlines()]
    assert [row["step"] for row in rows if row.get("loss/grad_norm", 0) > 0] == [1, 2, 3]
    # A check whose engine or learner was killed is left out.
    differences = [row.get("canary/logprob_difference") for row in rows]
    assert max(found for found in differences if found is not None) < 1e-3
    # `checkpoints` has those of another module, of the same names.
    laptop.run(f"{LAUNCHER} down --yes --to of-two-machines")
    until(lambda: not jobs("art-"), lambda: str(jobs("")))


def server_log() -> str:
    """What `launcher logs server` shows, without the seconds that it takes to ask SkyPilot."""
    logs = (LAB / "home/arthpc/.sky_clusters").glob("art-*/sky_logs/*/tasks/*.log")
    return "".join(path.read_text(errors="replace") for path in sorted(logs))


def running(module: str) -> Iterator[int]:
    """The processes of the cluster that were started as a module of Python's."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError, KeyError):  # it has ended, or its user is of elsewhere
            # Other tests that run meanwhile have such processes too.
            if path.owner() == "arthpc" and module in path.read_text().split("\0"):
                yield int(path.parent.name)


def engine_of(owner: str) -> int:
    """The process that samples for the server, or for Ray's actor on the second machine."""
    for pid in running("trainer.engines.embedded_worker"):
        if owner in Path(f"/proc/{parent(pid)}/cmdline").read_text():
            return pid
    raise AssertionError(f"no engine belongs to {owner!r}")


def ticks(pid: int) -> int:
    """How long a process has computed, in hundredths of a second."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11])


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def test_a_managed_run_that_slurm_cancels_goes_on_from_its_last_checkpoint(laptop: Any) -> None:
    (laptop.clone / "managed.yaml").write_text(MANAGED.format(clone=laptop.clone))
    state = LAB / "home/arthpc/state"  # the account's own home, which every cluster of it sees
    checkpoints = state / "e2e/models/kept/checkpoints"
    (laptop.clone / ".env").chmod(0o644)  # ART's client reads the one above its own files
    command = f"{PYTHON.format(clone=laptop.clone)}/train_until.py kept 4 5"
    run_id = laptop.run(
        f"{LAUNCHER} run --managed --task managed.yaml --state-dir {state} '{command}'"
    ).strip()

    def progress() -> str:
        return f"{sorted(checkpoints.glob('*'))} {jobs('')}"

    def status() -> str:
        (run,) = json.loads(laptop.run(f"{LAUNCHER} ls --managed --json"))
        assert run["id"] == run_id
        return str(run["status"])

    def told() -> str:
        return status() + laptop.run(f"{LAUNCHER} logs --managed {run_id} --no-follow")

    until((checkpoints / "0001/manifest.json").exists, progress, told)
    (job,) = jobs("managed-")
    slurm("scancel", f"--name={job.split()[0]}")
    before = hashes(checkpoints)
    assert not (checkpoints / "0004").exists()
    until((checkpoints / "0004/manifest.json").exists, progress, told)
    until(lambda: status() == "succeeded", progress, told)
    assert "goes on from step" in laptop.run(f"{LAUNCHER} logs --managed")
    after = hashes(checkpoints)
    assert {path: after[path] for path in before} == before
    history = (state / "e2e/models/kept/history.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in history if "time/step_s" in line]
    assert steps == [1, 2, 3, 4]


def hashes(checkpoints: Path) -> dict[str, str]:
    """Of every file of a whole checkpoint."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in checkpoints.glob("[0-9]*/*")
    }
