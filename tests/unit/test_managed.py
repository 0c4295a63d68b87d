"""What managed runs send to SkyPilot. The test on Slurm shows that they resume."""

import io
import json
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from launcher.cli.main import cli
from launcher.errors import LauncherError, TaskError
from launcher.provider import Run, RunStatus
from launcher.settings import Settings
from launcher.skypilot import managed
from launcher.skypilot.managed import _config
from launcher.skypilot.testing import FakeJob, FakeSky, FakeStatus
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


def test_the_command_runs_beside_the_server_and_its_exit_code_is_returned(tmp_path: Path) -> None:
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


def test_a_server_that_exits_ends_the_run(tmp_path: Path) -> None:
    with socket.socket() as one, socket.socket() as other:
        for closed in (one, other):  # held, so that no test beside this one listens there
            closed.bind(("127.0.0.1", 0))
        given = Settings(port=one.getsockname()[1], openai_port=other.getsockname()[1])
        done = run(tmp_path, script(tmp_path, "true", "sleep 600", given))
    assert done.returncode == 1
    assert done.stderr.endswith("The server exited before the command started\n")


@pytest.mark.parametrize(
    ("state_dir", "message"), [(None, "storage that outlives"), ("~/state", "would not find")]
)
def test_a_run_whose_state_would_be_lost_is_refused(
    tmp_path: Path, state_dir: Any, message: str
) -> None:
    (tmp_path / "task.yaml").write_text("run: echo\n")
    task = Task.load(tmp_path / "task.yaml", Settings())
    with pytest.raises(LauncherError, match=message):
        _config(task, "true", Settings(), state_dir)


def test_a_task_of_several_machines_is_refused_before_anything_is_rented() -> None:
    given = Settings(bucket="s3://mine")
    task = Task.load(Path(__file__).parents[2] / "sky/art-multi-node.yaml", given)
    with pytest.raises(TaskError, match=r"requests 2 machines, but a managed run has one"):
        managed.start(task, "true", given, state_dir=None)


def test_a_bucket_keeps_the_state_and_skypilot_ends_the_cluster() -> None:
    given = Settings(bucket="s3://mine")
    task = Task.load(Path(__file__).parents[2] / "sky/art.yaml", given)
    config = _config(task, "true", given, None)
    assert config["file_mounts"]["~/sky_workdir/.art"]["source"] == "s3://mine"
    assert "autostop" not in config["resources"] and "ordered" in config["resources"]
    assert config["resources"]["job_recovery"]


def test_a_started_run_has_the_id_that_skypilot_gives_it(sky: FakeSky, tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text("name: mine\nrun: echo serve\n")
    task = Task.load(tmp_path / "task.yaml", Settings())
    assert managed.start(task, "train", Settings(), state_dir="/shared") == "1"
    assert managed.runs() == [Run("1", "mine", RunStatus.PENDING)]


@pytest.fixture
def invoke(sky: FakeSky) -> Any:
    def run(*arguments: str) -> Any:
        return CliRunner(mix_stderr=False).invoke(cli, arguments)

    return run


def test_managed_runs_are_listed_as_other_runs_are(sky: FakeSky, invoke: Any) -> None:
    assert invoke("ls", "--managed", "--json").stdout == "[]\n"
    statuses = {
        FakeStatus.RUNNING: "running",
        FakeStatus.RECOVERING: "pending",
        FakeStatus.SUCCEEDED: "succeeded",
        FakeStatus.FAILED_SETUP: "failed",
        FakeStatus.CANCELLED: "cancelled",
    }
    for status in statuses:
        sky.managed.add(FakeJob("art", status))
    listed = json.loads(invoke("ls", "--managed", "--json").stdout)
    assert [run["id"] for run in listed] == ["1", "2", "3", "4", "5"]
    assert [run["status"] for run in listed] == list(statuses.values())


def test_logs_are_of_the_newest_managed_run_or_of_the_named_one(sky: FakeSky, invoke: Any) -> None:
    sky.managed.add(FakeJob("art", FakeStatus.SUCCEEDED, log="of run 1\n"))
    sky.managed.add(FakeJob("art", FakeStatus.RUNNING, log="of run 2\n"))
    assert invoke("logs", "--managed").stdout == "of run 2\n"
    assert sky.tailed == [(2, True, None)]
    shown = invoke("logs", "--managed", "1", "--no-follow", "--tail", "5")
    assert shown.stdout == "of run 1\n"
    assert sky.tailed[1:] == [(1, False, 5)]


def test_a_managed_log_whose_reader_is_gone_is_not_a_lost_connection(
    sky: FakeSky, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ClosedPipe(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    sky.managed.add(FakeJob("art", FakeStatus.RUNNING, log="line\n"))
    monkeypatch.setattr("sys.stdout", ClosedPipe())
    with pytest.raises(BrokenPipeError):
        managed.logs("1", follow=True)


def test_a_managed_run_is_cancelled_once(sky: FakeSky, invoke: Any) -> None:
    sky.managed.add(FakeJob("art", FakeStatus.RECOVERING))
    assert "is cancelled" in invoke("cancel", "--managed", "1").stderr
    assert sky.managed == {1: FakeJob("art", FakeStatus.CANCELLED)}
    assert "was already over" in invoke("cancel", "--managed", "1").stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["logs"], "no managed runs yet"), (["logs", "7"], "no managed run `7`"),
     (["cancel", "x"], "no managed run `x`")],
)  # fmt: skip
def test_a_managed_run_that_does_not_exist_is_named(
    invoke: Any, arguments: list[str], message: str
) -> None:
    assert message in invoke(*arguments, "--managed").exception.message


@pytest.mark.parametrize("option", ["--local", "-cart"])
def test_managed_runs_take_neither_a_cluster_nor_local(invoke: Any, option: str) -> None:
    for verb, *rest in (["ls"], ["logs"], ["cancel", "1"], ["run", "true"]):
        result = invoke(verb, "--managed", option, *rest)
        assert result.exit_code == 2 and "remove `-c` and `--local`" in result.stderr
