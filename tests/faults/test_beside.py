"""Killing what runs beside the server: the harness, and commands of the launcher."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

from kit.manifest import damage, sha256, write_manifest
from launcher.local.provider import LocalProvider
from launcher.settings import Settings
from launcher.task import Task
from tests.contract.harness.conftest import Project, guide, write_project
from tests.environments import client_environment
from tests.faults.patient import BASE
from tests.serving import Serving

ROUNDS = 3
EPOCHS = 6
TASK = "name: demo\nworkdir: work\nrun: sleep 900\n"


def strike(process: "subprocess.Popen[bytes]", chance: random.Random, within_s: float) -> None:
    """Kill a process at a random moment; half of the time it is frozen first."""
    time.sleep(chance.uniform(0, within_s))
    if chance.random() < 0.5:
        process.send_signal(signal.SIGSTOP)
        time.sleep(chance.uniform(0, 0.5))
    process.kill()
    process.wait(60)


def test_a_harness_that_is_killed_at_random_moments_trains_every_epoch_once(
    tmp_path: Path, chance: random.Random, rounds: int
) -> None:
    epochs = str(EPOCHS * rounds)
    with Serving(tmp_path / "server", BASE) as serving:
        (tmp_path / "project").mkdir()
        write_project(tmp_path / "project")
        project = Project(tmp_path / "project", guide(serving, "run"))
        project.config["finetuning"]["num_epochs"] = 1
        project.finetune()  # so that there is a run to resume
        command = project.command("--resume", "-o", "finetuning.num_epochs", epochs)
        for _ in range(ROUNDS * rounds):
            with (tmp_path / "log").open("ab") as log:
                process = subprocess.Popen(
                    command, cwd=project.directory, env=client_environment(), stderr=log
                )
            strike(process, chance, within_s=8)
        project.finetune("--resume", "-o", "finetuning.num_epochs", epochs)
        metrics = project.read("training_metrics.jsonl")
        assert [row["epoch"] for row in metrics] == list(range(1, EPOCHS * rounds + 1))
        assert len({row["run_id"] for row in metrics}) == 1
        model = {"name": "run", "project": "harness"}
        step = httpx.post(f"{serving.control}/_get_step", json=model, timeout=60).json()
        assert step == metrics[-1]["step"]
        assert [row["step"] for row in metrics] == sorted({row["step"] for row in metrics})
        assert "Traceback" not in (tmp_path / "log").read_text()


def test_commands_of_the_launcher_that_are_killed_can_be_given_again(
    tmp_path: Path, chance: random.Random, rounds: int
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "task.yaml").write_text(TASK.replace("work\n", f"{work}\n"))
    provider = LocalProvider()
    provider.launch("art", Task.load(tmp_path / "task.yaml", Settings()), [])
    checkpoints = provider.workdir("art") / ".art/project/models/run/checkpoints"
    for step in range(6):
        path = checkpoints / f"{step:04d}"
        path.mkdir(parents=True)
        (path / "adapter_model.safetensors").write_bytes(chance.randbytes(4_000_000))
        write_manifest(path, {"step": step})
    expected = {
        str(file.relative_to(checkpoints)): sha256(file) for file in checkpoints.glob("*/*")
    }

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    launcher = [sys.executable, "-m", "launcher"]

    def interrupt(*arguments: str) -> None:
        command = [*launcher, *arguments, "--local", "-c", "art"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        strike(subprocess.Popen(command, cwd=tmp_path, env=environment, **quiet), chance, usual_s)

    def finish(*arguments: str) -> str:
        done = subprocess.run(
            [*launcher, *arguments, "--local"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout

    began = time.monotonic()
    finish("ls", "--json")
    usual_s = 2 * (time.monotonic() - began)
    home = tmp_path / "home"
    for number in range(ROUNDS * rounds):
        interrupt("pull", "--to", str(home / str(number)))
        finish("pull", "--to", str(home / str(number)))
        (found,) = (home / str(number)).glob("project/models/run/checkpoints")
        files = {str(file.relative_to(found)): sha256(file) for file in found.glob("*/*")}
        assert files == expected
        assert not [fault for path in found.iterdir() for fault in damage(path)]
        interrupt("sync")
        finish("sync")
    for _ in range(2):
        interrupt("down", "--yes")
    finish("down", "--yes")
    assert json.loads(finish("ls", "--json")) == []
    finish("down", "--yes")
