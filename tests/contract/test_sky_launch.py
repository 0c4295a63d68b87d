"""What a launch asks SkyPilot for, up to its own `sky launch`; that it works is shown on Slurm."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from launcher.errors import TaskError
from launcher.lease import Lease
from launcher.provider import SETUP, Cost, Run, RunStatus, live_server
from launcher.settings import Settings
from launcher.skypilot import launch as sky_launch
from launcher.skypilot import managed
from launcher.skypilot import runs as sky_runs
from launcher.skypilot.provider import SkyProvider
from launcher.task import Task

# SkyPilot warns about its own dependencies on import.
pytestmark = pytest.mark.filterwarnings("ignore")
TASK = """
resources: {resources}
secrets: {{HF_TOKEN: null}}
setup: echo set up
run: echo serve
"""


class FakeSky:
    """SkyPilot, whose requests are their answers; it notes what it launched and executed."""

    def __init__(self, *clouds: str) -> None:
        self.clouds = clouds
        self.client = SimpleNamespace(sdk=self)
        self.Task = self
        self.under_way: list[str] = []
        self.waited: list[str] = []
        self.launched: list[dict[str, Any]] = []
        self.executed: list[dict[str, Any]] = []
        self.names: list[str | None] = []
        self.jobs = {2: "run", 1: "a"}
        self.shown: list[int] = []

    def get(self, request: Any) -> Any:
        return request

    def enabled_clouds(self) -> tuple[str, ...]:
        return self.clouds

    def status(self, names: list[str]) -> list[Any]:
        size = {"cloud": self.clouds[0], "cpus": "4", "accelerators": {"H100": 1}}
        handle = SimpleNamespace(launched_resources=SimpleNamespace(**size))
        return [{"status": SimpleNamespace(value="UP"), "handle": handle}] if self.launched else []

    def api_status(self, *, cluster_name: str, **_: Any) -> list[Any]:
        over = [("sky.launch", (7, None, None))] if self.launched else []
        requests = [*((name, name) for name in self.under_way), *over]
        return [
            SimpleNamespace(name=name, request_id=request_id, cluster_name=cluster)
            for cluster in ("other", cluster_name)
            for name, request_id in requests
        ]

    def stream_and_get(self, request_id: str) -> None:
        self.waited.append(request_id)

    def queue(self, name: str) -> list[Any]:
        running = SimpleNamespace(value="RUNNING")
        return [{"job_id": i, "job_name": it, "status": running} for i, it in self.jobs.items()]

    def tail_logs(self, name: str, job_id: int, **_: Any) -> int:
        self.shown.append(job_id)
        return 0

    def from_yaml_config(self, config: Any, **_: Any) -> Any:
        return config

    def exec(self, task: Any, *, cluster_name: str) -> tuple[int, None]:
        self.executed.append(task)
        return 8, None


def use(skypilot: FakeSky, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sky_launch, sky_runs):
        monkeypatch.setattr(module, "sky", lambda: skypilot)


def launch(
    skypilot: FakeSky,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    resources: str = "{cpus: 4, memory: 8}",
    *arguments: str,
    max_cost: float | None = None,
) -> Run | None:
    def invoke(name: str, command: Any, context: Any) -> None:
        (path,) = context.params["entrypoint"]
        skypilot.names.append(context.params["name"])
        skypilot.launched.append(yaml.safe_load(Path(path).read_text()))
        assert ("HF_TOKEN", "hf_x") in context.params["secret"] and "hf_x" not in str(
            skypilot.launched
        )

    use(skypilot, monkeypatch)
    monkeypatch.setattr(sky_launch, "_invoke", invoke)
    (tmp_path / "task.yaml").write_text(TASK.format(resources=resources))
    settings = Settings.model_validate({"hf_token": "hf_x"})
    task = Task.load(tmp_path / "task.yaml", settings, lease=Lease(max_cost=max_cost))
    return sky_launch.launch(
        "art", task, arguments, reachable=lambda: None, cost=lambda name: Cost(0.1, 1, 0.1, None)
    )


@pytest.mark.parametrize("cloud", ["aws", "slurm"])
def test_one_request_is_cluster_setup_and_server(
    cloud: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skypilot = FakeSky(cloud)
    assert launch(skypilot, tmp_path, monkeypatch) == Run("7", "task", RunStatus.PENDING)
    (launched,) = skypilot.launched
    assert "echo set up" in launched["run"] and launched["run"].endswith("echo serve")
    assert "setup" not in launched and launched["resources"]["autostop"]["down"]
    assert skypilot.executed == []


@pytest.mark.parametrize(
    ("resources", "arguments", "max_cost"),
    [
        ("{accelerators: H100}", (), None),
        ("{cpus: 4, memory: 8}", ("--cpus", "8"), None),
        ("{cpus: 4, memory: 8}", (), 2.0),
    ],
)
def test_two_requests_are_a_cluster_without_a_job_and_then_the_server(
    resources: str,
    arguments: tuple[str, ...],
    max_cost: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    skypilot = FakeSky("slurm")
    run = launch(skypilot, tmp_path, monkeypatch, resources, *arguments, max_cost=max_cost)
    assert run == Run("8", "task", RunStatus.PENDING)
    (launched,), (executed,) = skypilot.launched, skypilot.executed
    assert "run" not in launched and "setup" not in launched
    assert launched["resources"]["autostop"]["down"]
    assert "echo set up" in executed["run"] and executed["run"].endswith("echo serve")
    assert executed["resources"] == {"accelerators": {"H100": 1}, "cpus": 3}


def test_a_launch_under_way_is_waited_for_and_its_server_is_the_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    skypilot = FakeSky("aws")
    skypilot.under_way = ["sky.logs", "sky.launch"]
    use(skypilot, monkeypatch)
    assert sky_launch.resume("art") == Run("1", "a", RunStatus.RUNNING)
    assert skypilot.waited == ["sky.launch"] and skypilot.launched == []


def test_a_launch_under_way_that_fails_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skypilot = FakeSky("aws")
    skypilot.under_way = ["sky.launch"]

    def fail(request: str) -> None:
        skypilot.under_way = []
        raise RuntimeError("no capacity")

    monkeypatch.setattr(skypilot, "stream_and_get", fail)
    monkeypatch.setattr(skypilot, "queue", lambda name: [])
    use(skypilot, monkeypatch)
    assert sky_launch.resume("art") is None
    assert launch(skypilot, tmp_path, monkeypatch) == Run("7", "task", RunStatus.PENDING)


def test_nothing_is_launched_that_would_send_the_env_file_along(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("HF_TOKEN=hf_x\n")
    (tmp_path / ".skyignore").write_text("data\n")
    (tmp_path / "task.yaml").write_text(f"workdir: {tmp_path}\nrun: echo\n")
    task = Task.load(tmp_path / "task.yaml", Settings(bucket="s3://mine"))
    with pytest.raises(TaskError, match="would go to the cluster"):
        SkyProvider().launch("art", task, [])
    with pytest.raises(TaskError, match="would go to the cluster"):
        managed.start(task, "true", Settings(), state_dir=None)


def test_several_machines_are_set_up_by_a_job_that_nobody_takes_for_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skypilot = FakeSky("aws")
    nodes = ("--num-nodes", "2", "--name", "mine")
    run = launch(skypilot, tmp_path, monkeypatch, "{}", *nodes)
    assert run == Run("8", "mine", RunStatus.PENDING)
    (launched,), (executed,) = skypilot.launched, skypilot.executed
    assert (launched["setup"], skypilot.names, skypilot.shown) == ("echo set up", [SETUP], [7])
    assert (executed["name"], executed["num_nodes"]) == ("mine", 2)
    assert live_server([Run("7", SETUP, RunStatus.RUNNING)]) is None


def test_a_setup_whose_launcher_was_killed_is_waited_for_and_the_server_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skypilot = FakeSky("aws")
    skypilot.launched.append({})  # by the launcher that was killed
    skypilot.jobs = {3: SETUP, 4: "run"}
    run = launch(skypilot, tmp_path, monkeypatch, "{}", "--num-nodes", "2")
    assert run == Run("8", "task", RunStatus.PENDING)
    assert (len(skypilot.launched), skypilot.shown) == (1, [3])
    (executed,) = skypilot.executed
    assert "echo set up" not in executed["run"] and executed["run"].endswith("echo serve")


def test_a_workdir_from_git_goes_to_skypilot_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skypilot, git = FakeSky("aws"), {"url": "https://example.com/x.git", "ref": "main"}
    assert launch(skypilot, tmp_path, monkeypatch, f"{{}}\nworkdir: {git}")
    assert skypilot.launched[0]["workdir"] == git
