"""Workers: machines that join the server of a cluster, with providers in memory."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from launcher.errors import NoCapacity, RemoteError, Unreachable
from launcher.provider import Cost, Run, RunStatus
from launcher.ray_head import RAY_HEAD
from launcher.skypilot.provider import SkyProvider
from launcher.skypilot.testing import FakeSky
from launcher.testing import FakeProvider

Invoke = Callable[..., Result]
HEAD = "HEAD=10.0.0.5:7998\nENGINE=embedded\nART_API_KEY=the-key\n"
PRICE = "sky_workdir/.art/dollars-per-hour"


@pytest.fixture
def provider(healthy_port: int, invoke: Invoke) -> FakeProvider:
    """A provider with the cluster `art` up, whose server runs on Ray."""
    provider = FakeProvider(port=healthy_port, files={RAY_HEAD: HEAD})
    assert invoke("up", "task.yaml", provider=provider).exit_code == 0
    provider.launched.clear()
    return provider


def workers(provider: FakeProvider) -> list[str]:
    return [it.name for it in provider.clusters() if it.name != "art"]


def test_workers_join_the_head_with_its_key_on_machines_like_its_own(
    invoke: Invoke, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ART_API_KEY", "another")  # the server has the one that it was started with
    monkeypatch.setenv("ART_BUCKET", "s3://state")
    result = invoke("up", "task.yaml", "--workers", "2", provider=provider)
    assert result.exit_code == 0, result.stderr
    assert "Cluster `art` has workers: 2" in result.stderr
    (first, task, arguments), (second, *_) = provider.launched
    assert (first, second) == ("art-worker-1", "art-worker-2")
    assert arguments == ["--infra", "nowhere", "--gpus", "H100:2"]
    assert (task.envs["HEAD"], task.envs["ENGINE"]) == ("10.0.0.5:7998", "embedded")
    assert task.secrets == {"ART_API_KEY": "the-key"}
    assert "the-key" not in str(task.config)
    assert task.envs["RAY_DASHBOARD"] == "0"
    # Only the server writes state.
    assert not any("sky_workdir" in place for place in task.config.get("file_mounts", {}))


def test_workers_of_a_server_with_a_dashboard_report_to_it(
    invoke: Invoke, provider: FakeProvider
) -> None:
    provider.files[RAY_HEAD] = f"{HEAD}DASHBOARD=8265\n"
    invoke("up", "task.yaml", "--workers", "1", provider=provider)
    ((_, task, _),) = provider.launched
    assert task.envs["RAY_DASHBOARD"] == "1"


def test_spot_and_other_gpus_are_for_workers_only(invoke: Invoke, healthy_port: int) -> None:
    provider = FakeProvider(port=healthy_port, files={RAY_HEAD: HEAD})
    given = ("--workers", "1", "--spot", "--worker-gpus", "L4:1")
    assert invoke("up", *given, provider=provider).exit_code == 0
    (head, task, for_head), (worker, _, for_worker) = provider.launched
    # Without a task the server is one on Ray, on one machine.
    assert (head, task.name, task.config["num_nodes"]) == ("art", "art-multi-node", 1)
    assert task.secrets["ART_API_KEY"].startswith("art-key-")
    assert for_head == []
    assert worker == "art-worker-1"
    assert for_worker == ["--infra", "nowhere", "--gpus", "H100:2", "--gpus", "L4:1", "--use-spot"]


def test_repeating_the_command_adds_and_removes_workers(
    invoke: Invoke, provider: FakeProvider
) -> None:
    for count in (1, 3, 3, 1, 0):
        result = invoke("up", "task.yaml", "--workers", str(count), provider=provider)
        assert result.exit_code == 0, result.stderr
        assert workers(provider) == [f"art-worker-{number + 1}" for number in range(count)]
    assert [name for name, *_ in provider.launched] == [f"art-worker-{it}" for it in (1, 2, 3)]
    assert provider.ended == ["art-worker-3", "art-worker-2", "art-worker-1"]
    assert invoke("up", "task.yaml", provider=provider).exit_code == 0  # leaves workers alone


def test_a_worker_whose_part_has_ended_is_started_again(
    invoke: Invoke, provider: FakeProvider
) -> None:
    invoke("up", "task.yaml", "--workers", "2", provider=provider)
    provider.runs("art-worker-2")[:] = [Run("1", "art-worker", RunStatus.FAILED)]
    invoke("up", "task.yaml", "--workers", "2", provider=provider)
    assert [name for name, *_ in provider.launched][2:] == ["art-worker-2"]


def test_a_worker_ends_with_the_lease_of_the_server(invoke: Invoke, provider: FakeProvider) -> None:
    provider.spent = Cost(1.5, 3.0, 0.5, time.time() + 7200)
    invoke("up", "task.yaml", "--workers", "1", "--max-hours", "1", provider=provider)
    provider.spent = Cost(1.5, 3.0, 0.5, None)
    invoke("up", "task.yaml", "--workers", "2", provider=provider)
    limits = [float(task.envs["ART_MAX_HOURS"]) for _, task, _ in provider.launched]
    assert limits == [pytest.approx(2, abs=0.1), 0]


def test_a_server_without_ray_is_left_alone(invoke: Invoke, provider: FakeProvider) -> None:
    provider.files.clear()
    result = invoke("up", "task.yaml", "--workers", "1", provider=provider)
    assert result.exit_code == 1
    assert result.stderr == (
        "error: The server of cluster `art` does not run on Ray: no worker can join it\n\n"
        "hint: Launch one that does with `launcher up art-multi-node -c NAME`\n"
    )
    assert workers(provider) == []


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RemoteError("tail: cannot open it"), "does not run on Ray"),
        (Unreachable("Cluster `art` cannot be reached"), "Cluster `art` cannot be reached"),
    ],
)
def test_a_head_that_cannot_be_reached_is_not_taken_for_one_without_ray(
    invoke: Invoke,
    provider: FakeProvider,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    message: str,
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(provider, "read", fails)
    result = invoke("up", "task.yaml", "--workers", "1", provider=provider)
    assert result.exit_code == 1 and message in result.stderr


def test_a_launch_that_fails_says_how_many_workers_run(
    invoke: Invoke, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = provider.launch

    def without_capacity(name: str, *arguments: Any, **options: Any) -> Run | None:
        if name == "art-worker-2":
            raise NoCapacity("No capacity for cluster `art-worker-2`")
        return launch(name, *arguments, **options)

    monkeypatch.setattr(provider, "launch", without_capacity)
    result = invoke("up", "task.yaml", "--workers", "3", provider=provider)
    assert result.exit_code == 1
    assert "error: No capacity for cluster `art-worker-2`" in result.stderr
    assert "1 of 3 workers run; repeat the command to add the others" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--spot",), "`--spot` is for workers: add `--workers N`"),
        (("--worker-gpus", "L4:1"), "`--worker-gpus` is for workers: add `--workers N`"),
        (("--workers", "1", "--local"), "`--workers` rents machines"),
        (("--workers", "1", "--max-cost", "5"), "`--max-cost` does not count workers"),
        (("art-worker",), "`art-worker` joins a server: use `launcher up --workers N`"),
    ],
)
def test_options_without_an_effect_are_refused(
    invoke: Invoke, provider: FakeProvider, arguments: tuple[str, ...], message: str
) -> None:
    result = invoke("up", *arguments, provider=provider)
    assert result.exit_code == 2 and message in result.stderr
    assert provider.launched == []


def test_cost_ls_and_the_page_include_workers(invoke: Invoke, provider: FakeProvider) -> None:
    invoke("up", "task.yaml", "--workers", "2", provider=provider)
    assert provider.files[PRICE] == "9.0000\n"
    spent = json.loads(invoke("cost", "--json", provider=provider).stdout)
    assert (spent["so_far"], spent["per_hour"], spent["hours"]) == (4.5, 9.0, 0.5)
    assert [it["name"] for it in spent["workers"]] == ["art-worker-1", "art-worker-2"]
    shown = invoke("cost", provider=provider).stdout.splitlines()
    assert shown[0].startswith("it cost $4.50") and shown[2] == "art-worker-1\t$1.50\t$3.00 an hour"
    listed = json.loads(invoke("ls", "--json", provider=provider).stdout)
    assert [it["name"] for it in listed] == ["art", "art-worker-1", "art-worker-2"]


def test_down_ends_the_workers_first_and_the_head_whatever_fails(
    invoke: Invoke, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    invoke("up", "task.yaml", "--workers", "2", provider=provider)
    invoke("up", "task.yaml", "-c", "art-worker", provider=provider)  # not a worker
    down = provider.down

    def breaks(name: str) -> None:
        if name == "art-worker-2":
            raise NoCapacity("SkyPilot failed")
        down(name)

    monkeypatch.setattr(provider, "down", breaks)
    result = invoke("down", "--yes", "--json", provider=provider)
    assert result.exit_code == 1 and "error: SkyPilot failed" in result.stderr
    assert provider.ended == ["art-worker-1", "art"]
    monkeypatch.setattr(provider, "down", down)
    assert invoke("down", "--yes", provider=provider).exit_code == 0  # what is left
    assert provider.ended[2:] == ["art-worker-2", "art"]
    assert workers(provider) == ["art-worker"]


@pytest.mark.filterwarnings("ignore")  # SkyPilot warns about its own dependencies on import
@pytest.mark.parametrize(
    ("cloud", "accelerators", "expected"),
    [
        ("AWS", {"H100": 2}, ["--infra", "aws/here", "--gpus", "H100:2"]),
        ("GCP", None, ["--infra", "gcp/here", "--gpus", "none", "--cpus", "4", "--memory", "8"]),
        (
            "Slurm",
            {"A100-80GB": 1},
            ["--infra", "slurm/here", "--gpus", "A100-80GB:1", "--cpus", "4", "--memory", "8"],
        ),
    ],
)
def test_a_worker_gets_the_machine_and_the_place_of_the_head(
    sky: FakeSky, cloud: str, accelerators: dict[str, int] | None, expected: list[str]
) -> None:
    sky.clouds, sky.accelerators = (cloud,), accelerators
    sky.make_cluster("art")
    assert SkyProvider().like("art") == expected


@pytest.mark.filterwarnings("ignore")
def test_skypilot_launches_a_worker_as_a_spot_machine(
    sky: FakeSky, invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from launcher.settings import Settings
    from launcher.workers import Workers

    provider = SkyProvider()

    def read(name: str, path: str, *, out: Any, **_: Any) -> None:
        out.write(HEAD)

    monkeypatch.setattr(provider, "read", read)  # over ssh
    sky.accelerators = {"H100": 2}
    sky.make_cluster("art", cloud="AWS", region="here", resources_str="1x")
    now = time.time()
    sky.costs = [{"name": "art", "launched_at": now, "duration": 3600, "total_cost": 2.0}]
    messages: list[str] = []
    Workers("art", provider, Settings()).scale(1, spot=True, gpus=None, progress=messages.append)
    (launch,) = sky.launched
    assert launch.options["cluster"] == "art-worker-1" and launch.options["use_spot"] is True
    assert (launch.options["gpus"], launch.options["infra"]) == ("H100:2", "aws/here")
    assert dict(launch.options["env"])["HEAD"] == "10.0.0.5:7998"
    assert dict(launch.options["secret"])["ART_API_KEY"] == "the-key"
    assert "ray-cluster" in launch.config["run"]
    assert "Launching worker `art-worker-1` on a spot machine" in messages
