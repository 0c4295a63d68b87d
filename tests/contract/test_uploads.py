"""No upload to a bucket is lost with its cluster: every job ends with SkyPilot's wait for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.settings import Settings
from launcher.skypilot import door, managed, scripts
from launcher.skypilot.provider import SkyProvider
from launcher.skypilot.testing import FakeSky
from launcher.task import Task
from tests.serving import free_port

ROOT = Path(__file__).parents[2]
# SkyPilot warns about its own dependencies on import.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A cluster's home. SkyPilot's wait starts with `findmnt`, which here creates `waited`."""
    for name, script in {
        "bin/findmnt": "touch ~/waited",
        "bin/getent": f"echo me:x:1:1::{tmp_path}:/bin/bash",  # makes it the account's home
        "sky_workdir/.venv/bin/trainer": "echo once >>~/trained\n"
        'if [ "$2" = --ray ] && [ "$(wc -l <~/trained)" = 1 ]; then kill -KILL $$; fi\nexit 5',
        "sky_workdir/.venv/bin/python": f'exec {sys.executable} "$@"',
        "sky_workdir/.venv/bin/ray": "echo Ray runtime started; exec sleep 60",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def run(script: str, home: Path, **envs: str) -> int:
    """The exit code of a job, with the commands that SkyPilot adds to its script."""
    from sky.backends.task_codegen import TaskCodeGen

    path = f"{home / 'bin'}:{os.environ['PATH']}"
    job = {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "SKYPILOT_NUM_NODES": "2"}
    job |= {"ART_KIT": str(ROOT), "ART_API_KEY": "key", "RAY_PATIENCE_S": "0"}
    whole = TaskCodeGen.build_task_bash_script(script)
    done = subprocess.run(
        ["bash", "-c", whole], cwd=home, env={"HOME": str(home), "PATH": path, **job, **envs}
    )
    return done.returncode


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("path", sorted((ROOT / "sky").glob("*.yaml")), ids=lambda path: path.name)
def test_a_server_that_exits_waits_for_its_uploads(home: Path, path: Path, rank: str) -> None:
    task = Task.load(path, Settings())
    script = scripts.server(task.config["run"], None, hours_include_setup=False)
    ports = {"RAY_PORT": str(free_port()), "HEAD": f"127.0.0.1:{free_port()}"}
    joins = path.stem == "art-worker" or (path.stem == "art-multi-node" and rank == "1")
    code = run(script, home, SKYPILOT_NODE_RANK=rank, **{**task.envs, **ports})
    assert code == (1 if joins else 5)  # there is no head to join
    assert (home / "waited").exists()
    # On Ray a server that was killed comes back to its engines.
    starts = 0 if joins else 2 if path.stem == "art-multi-node" else 1
    trained = home / "trained"
    assert (trained.read_text().count("once") if trained.exists() else 0) == starts


@pytest.mark.parametrize(
    ("server", "command", "code"),
    [
        ("", "exit 3", 3),
        ("timeout 3 ", "sleep 600", 1),
    ],  # the second server exits before its command
)
def test_a_managed_run_waits_for_its_uploads(
    home: Path, server: str, command: str, code: int
) -> None:
    given = Settings(port=free_port(), openai_port=free_port())
    ports = f"{given.port}, {given.openai_port}"
    listen = f"import socket, time; s = [socket.create_server(('127.0.0.1', p)) for p in ({ports})]"
    (home / "task.yaml").write_text(f'run: |\n  {server}python3 -c "{listen}; time.sleep(600)"\n')
    task = Task.load(home / "task.yaml", given)
    config = managed._config(task, command, given, str(home / "state"))
    assert run(config["run"], home) == code
    assert (home / "waited").exists()


def test_a_run_does_not_wait_for_files_that_the_server_has_open(home: Path) -> None:
    assert run(scripts.run("exit 7"), home, SKYPILOT_INTERNAL_JOB_ID="4") == 7
    assert not (home / "waited").exists()


@pytest.mark.parametrize(
    ("bucket", "ever_up", "graceful"),
    [("s3://mine", True, True), ("s3://mine", False, False), (None, True, False)],
)
def test_down_waits_for_uploads_if_there_can_be_any(
    sky: FakeSky, bucket: str | None, ever_up: bool, graceful: bool
) -> None:
    config = dict(Task.load(ROOT / "sky/art.yaml", Settings(bucket=bucket)).config)
    real_task = door.installed().Task.from_yaml_config(config)
    recorded = str(real_task.to_yaml_config())
    sky.make_cluster("art", cluster_ever_up=ever_up, last_creation_yaml=recorded)
    SkyProvider().down("art")
    (down,) = sky.downs
    assert down["graceful"] == graceful and down["graceful_timeout"] > 0
    assert sky.records == {}
