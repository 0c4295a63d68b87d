"""What launches send to SkyPilot, parsed by its own `sky launch`. Slurm's test shows they work."""

from pathlib import Path

import pytest

from launcher.errors import ProviderError, TaskError
from launcher.lease import Lease
from launcher.provider import SETUP, Cost, Run, RunStatus, live_server
from launcher.settings import Settings
from launcher.skypilot import launch as sky_launch
from launcher.skypilot import managed, scripts
from launcher.skypilot.provider import SkyProvider
from launcher.skypilot.testing import FakeJob, FakeQueue, FakeRequest, FakeSky, FakeStatus
from launcher.task import Task

# SkyPilot warns about its own dependencies on import.
pytestmark = pytest.mark.filterwarnings("ignore")
TASK = """
resources: {resources}
secrets: {{HF_TOKEN: null}}
setup: echo set up
run: echo serve
"""


def launch(
    sky: FakeSky,
    tmp_path: Path,
    resources: str = "{cpus: 4, memory: 8}",
    *arguments: str,
    max_cost: float | None = None,
) -> Run | None:
    (tmp_path / "task.yaml").write_text(TASK.format(resources=resources))
    settings = Settings.model_validate({"hf_token": "hf_x"})
    task = Task.load(tmp_path / "task.yaml", settings, lease=Lease(max_cost=max_cost))
    run = sky_launch.launch(
        "art", task, arguments, reachable=lambda: None, cost=lambda name: Cost(0.1, 1, 0.1, None)
    )
    for call in sky.launched:
        assert ("HF_TOKEN", "hf_x") in call.options["secret"]
        assert "hf_x" not in str(call.config)
    return run


@pytest.mark.parametrize("cloud", ["aws", "slurm"])
def test_one_request_makes_the_cluster_and_runs_setup_and_server(
    sky: FakeSky, cloud: str, tmp_path: Path
) -> None:
    sky.clouds = [cloud]
    assert launch(sky, tmp_path) == Run("1", "task", RunStatus.PENDING)
    (launched,) = sky.launched
    config = launched.config
    assert "echo set up" in config["run"] and "bash -c 'echo serve'" in config["run"]
    assert "setup" not in config and config["resources"]["autostop"]["down"]
    assert sky.executed == []


@pytest.mark.parametrize(
    ("resources", "arguments", "max_cost"),
    [
        ("{accelerators: H100}", (), None),
        ("{cpus: 4, memory: 8}", ("--cpus", "8"), None),
        ("{cpus: 4, memory: 8}", (), 2.0),
    ],
)
def test_two_requests_make_the_cluster_and_then_start_the_server(
    sky: FakeSky,
    resources: str,
    arguments: tuple[str, ...],
    max_cost: float | None,
    tmp_path: Path,
) -> None:
    sky.clouds, sky.accelerators = ["slurm"], {"H100": 1}
    run = launch(sky, tmp_path, resources, *arguments, max_cost=max_cost)
    assert run == Run("1", "task", RunStatus.PENDING)
    (launched,), (executed,) = sky.launched, sky.executed
    assert "run" not in launched.config and "setup" not in launched.config
    assert launched.config["resources"]["autostop"]["down"]
    assert "echo set up" in executed["run"] and "bash -c 'echo serve'" in executed["run"]
    assert executed["resources"] == {"accelerators": {"H100": 1}, "cpus": 3}


def test_a_dry_run_starts_nothing(sky: FakeSky, tmp_path: Path) -> None:
    assert launch(sky, tmp_path, "{}", "--dryrun", "--num-nodes", "2") is None
    assert len(sky.launched) == 1 and sky.records == {} and sky.executed == []


def unfinished(*names: str, error: Exception | None = None) -> list[FakeRequest]:
    """Requests under way, of another cluster and of `art`."""
    return [
        FakeRequest(f"{name} {cluster}", name, cluster, finished=False, error=error)
        for cluster in ("other", "art")
        for name in names
    ]


def test_resume_waits_for_a_launch_under_way_and_returns_its_server(sky: FakeSky) -> None:
    sky.make_cluster("art")
    sky.queues["art"] = FakeQueue(
        {2: FakeJob("run", FakeStatus.RUNNING), 1: FakeJob("a", FakeStatus.RUNNING)}
    )
    sky.requests = unfinished("sky.logs", "sky.launch")
    under_way = list(sky.requests)
    assert sky_launch.resume("art") == Run("1", "a", RunStatus.RUNNING)
    assert [it.request_id for it in under_way if it.finished] == ["sky.launch art"]
    assert sky.launched == []


def test_a_launch_under_way_that_fails_is_made_again(sky: FakeSky, tmp_path: Path) -> None:
    sky.requests = unfinished("sky.launch", error=RuntimeError("no capacity"))
    assert sky_launch.resume("art") is None
    assert launch(sky, tmp_path) == Run("1", "task", RunStatus.PENDING)


def test_no_launch_sends_the_env_file_along(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("HF_TOKEN=hf_x\n")
    (tmp_path / ".skyignore").write_text("data\n")
    (tmp_path / "task.yaml").write_text(f"workdir: {tmp_path}\nrun: echo\n")
    task = Task.load(tmp_path / "task.yaml", Settings(bucket="s3://mine"))
    with pytest.raises(TaskError, match="would go to the cluster"):
        SkyProvider().launch("art", task, [])
    with pytest.raises(TaskError, match="would go to the cluster"):
        managed.start(task, "true", Settings(), state_dir=None)


def test_the_job_that_sets_up_several_machines_is_not_mistaken_for_the_server(
    sky: FakeSky, tmp_path: Path
) -> None:
    run = launch(sky, tmp_path, "{}", "--num-nodes", "2", "--name", "mine")
    assert run == Run("2", "mine", RunStatus.PENDING)
    (launched,), (executed,) = sky.launched, sky.executed
    setup = scripts.setup_first("echo set up")
    assert (launched.config["setup"], launched.options["name"]) == (setup, SETUP)
    assert sky.tailed == [(1, True, 0)]
    assert (executed["name"], executed["num_nodes"]) == ("mine", 2)
    assert live_server([Run("7", SETUP, RunStatus.RUNNING)]) is None


def test_a_setup_whose_launcher_was_killed_is_waited_for_and_the_server_follows(
    sky: FakeSky, tmp_path: Path
) -> None:
    sky.make_cluster("art")  # by the launcher that was killed
    sky.queues["art"] = FakeQueue(
        {3: FakeJob(SETUP, FakeStatus.RUNNING), 4: FakeJob("run", FakeStatus.RUNNING)}
    )
    run = launch(sky, tmp_path, "{}", "--num-nodes", "2")
    assert run == Run("5", "task", RunStatus.PENDING)
    assert (sky.launched, sky.tailed) == ([], [(3, True, 0)])
    (executed,) = sky.executed
    assert "echo set up" not in executed["run"] and "bash -c 'echo serve'" in executed["run"]


def test_no_server_starts_after_a_setup_that_failed(sky: FakeSky, tmp_path: Path) -> None:
    sky.make_cluster("art")
    sky.queues["art"] = FakeQueue(
        {1: FakeJob(SETUP, FakeStatus.RUNNING, "(task, pid=7) error: no disk\n", exit_code=100)}
    )
    with pytest.raises(ProviderError, match="The setup of cluster `art` failed:\n  error: no disk"):
        launch(sky, tmp_path, "{}", "--num-nodes", "2")
    assert sky.executed == []


def test_a_workdir_from_git_goes_to_skypilot_unchanged(sky: FakeSky, tmp_path: Path) -> None:
    git = {"url": "https://example.com/x.git", "ref": "main"}
    assert launch(sky, tmp_path, f"{{}}\nworkdir: {git}")
    assert sky.launched[0].config["workdir"] == git
