"""What a managed run asks SkyPilot for; that it resumes is shown on Slurm."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import LauncherError
from launcher.managed import _config
from launcher.settings import Settings
from launcher.task import Task
from tests.serving import free_port

SERVER = """
import http.server, sys
servers = [http.server.HTTPServer(("127.0.0.1", int(port)), None) for port in sys.argv[1:]]
servers[0].serve_forever()
"""


def script(tmp_path: Path, server: str, command: str, settings: Settings) -> str:
    (tmp_path / "task.yaml").write_text(f"run: |\n  {server}\nresources: {{cpus: 2}}\n")
    task = Task.load(tmp_path / "task.yaml", settings)
    config = _config(task, command, settings, str(tmp_path / "state"))
    return str(config["run"])


def run(tmp_path: Path, text: str) -> "subprocess.CompletedProcess[str]":
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    return subprocess.run(["bash", "-c", text], env=environment, capture_output=True, text=True)


def settings() -> Settings:
    return Settings(port=free_port(), openai_port=free_port())


def test_the_command_runs_beside_the_server_and_gives_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    given = settings()
    server = f"python3 {tmp_path}/server.py {given.port} {given.openai_port}"
    text = script(tmp_path, server, "echo $ART_BASE_URL $OPENAI_BASE_URL; exit 3", given)
    done = run(tmp_path, text)
    assert done.returncode == 3
    assert done.stdout == (
        f"http://127.0.0.1:{given.port} http://127.0.0.1:{given.openai_port}/v1\n"
    )
    assert (tmp_path / "sky_workdir/.art").resolve() == tmp_path / "state"


def test_a_server_that_ends_ends_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, script(tmp_path, "true", "sleep 600", settings()))
    assert done.returncode == 1
    assert done.stderr.endswith("The server ended before the command began\n")


@pytest.mark.parametrize(
    ("state_dir", "message"), [(None, "no place that outlives"), ("~/state", "would not find")]
)
def test_a_state_that_would_be_lost_is_refused(
    tmp_path: Path, state_dir: Any, message: str
) -> None:
    (tmp_path / "task.yaml").write_text("run: echo\n")
    task = Task.load(tmp_path / "task.yaml", Settings())
    with pytest.raises(LauncherError, match=message):
        _config(task, "true", Settings(), state_dir)


def test_a_bucket_keeps_the_state_and_skypilot_ends_the_cluster() -> None:
    given = Settings(bucket="s3://mine")
    task = Task.load(Path(__file__).parents[2] / "sky/art.yaml", given)
    config = _config(task, "true", given, None)
    assert config["file_mounts"]["~/sky_workdir/.art"]["source"] == "s3://mine"
    assert "autostop" not in config["resources"] and "ordered" in config["resources"]
    assert config["resources"]["job_recovery"]
