"""`launcher up`: which task it launches, with which options, and what it does the second time."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from launcher.cluster import Cluster
from launcher.settings import Settings
from launcher.task import Task
from launcher.testing import FakeProvider

TASK = "name: demo\nenvs: {BASE_MODEL: tiny-random}\nsecrets: {HF_TOKEN: null}\nrun: serve\n"


Invoke = Callable[..., Result]


def test_up_waits_for_health_and_prints_the_next_command(invoke: Invoke, healthy_port: int) -> None:
    result = invoke("up", "task.yaml", "-c", "mine", provider=FakeProvider(port=healthy_port))
    assert result.exit_code == 0
    assert "Cluster `mine` is up and its server is healthy" in result.stderr
    assert "launcher tunnel -c mine" in result.stderr


def test_up_twice_starts_one_server(invoke: Invoke, provider: FakeProvider) -> None:
    assert invoke("up", "task.yaml", provider=provider).exit_code == 0
    assert len(provider.launched) == 1


def test_up_again_keeps_the_server_and_lists_the_options_that_were_not_applied(
    invoke: Invoke, provider: FakeProvider
) -> None:
    Path("other.yaml").write_text(TASK.replace("demo", "other"))
    given = ["--env", "X=y", "--env", "Y=z", "--max-hours", "2"]
    result = invoke("up", "other.yaml", *given, provider=provider)
    assert (result.exit_code, len(provider.launched)) == (0, 1)
    assert (
        "The server of cluster `art` is already running, with its original lease; "
        "not applied, because the cluster exists: `other.yaml`, `--max-hours`, `--env`\n"
    ) in result.stderr
    assert "Lease:" not in result.stderr
    same = invoke("up", "task.yaml", provider=provider).stderr
    assert "not applied" not in same and "with its original lease\n" in same
    assert "`--no-lease`" in invoke("up", "task.yaml", "--no-lease", provider=provider).stderr


def test_up_resumes_a_launch_whose_launcher_was_killed(
    invoke: Invoke, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider, "resume", lambda name: provider.runs(name)[0])
    provider.status = "init"
    result = invoke("up", "task.yaml", "--max-hours", "2", provider=provider)
    assert (result.exit_code, len(provider.launched)) == (0, 1)
    assert "not applied, because the cluster exists: `--max-hours`" in result.stderr


def test_arguments_of_sky_launch_are_listed_without_their_values(
    provider: FakeProvider,
) -> None:
    messages: list[str] = []
    cluster = Cluster("art", provider=provider, settings=Settings())
    task = Task.load(Path("task.yaml"), cluster.settings)
    assert cluster.up(task, ["--infra", "slurm/lab", "--secret=A=b"], progress=messages.append)
    assert messages[0].endswith("not applied, because the cluster exists: `--infra`, `--secret`")
    assert provider.files["sky_workdir/.art/dollars-per-hour"] == "3.0000\n"


def test_a_server_keeps_the_ports_that_its_task_was_launched_with(
    invoke: Invoke, healthy_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider, ports = FakeProvider(port=healthy_port), list[dict[int, int]]()
    open_tunnel = provider.tunnel
    monkeypatch.setattr(
        provider,
        "tunnel",
        lambda name, wanted: (ports.append(wanted), open_tunnel(name, wanted))[1],
    )
    Path("task.yaml").write_text(TASK.replace("tiny-random", "tiny-random, ART_OPENAI_PORT: 9000"))
    assert invoke("up", "task.yaml", "--env", "ART_PORT=9999", provider=provider).exit_code == 0
    assert provider.launched[0][1].envs["ART_OPENAI_PORT"] == "9000"
    invoke("run", "true", provider=provider)
    assert provider.started[0]["envs"] == {
        "ART_BASE_URL": "http://127.0.0.1:9999",
        "OPENAI_BASE_URL": "http://127.0.0.1:9000/v1",
    }
    assert invoke("up", "task.yaml", provider=provider).exit_code == 0  # the same server still
    assert ports == [{9999: 0, 9000: 0}] * 2
    invoke("down", "--yes", provider=provider)
    monkeypatch.setenv("ART_OPENAI_PORT", "9001")  # the environment wins over the task
    assert invoke("up", "task.yaml", provider=provider).exit_code == 0
    assert ports[-1] == {7999: 0, 9001: 0}


def test_up_finishes_a_cluster_that_was_not_fully_created(
    invoke: Invoke, provider: FakeProvider
) -> None:
    provider.status = "init"
    assert invoke("up", "task.yaml", provider=provider).exit_code == 0
    assert len(provider.launched) == 2


def test_env_on_the_command_line_overrides_the_environment(
    invoke: Invoke, healthy_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BASE_MODEL", "from-environment")
    provider = FakeProvider(port=healthy_port)
    invoke("up", "task.yaml", "--env", "BASE_MODEL=from-flag", provider=provider)
    assert provider.launched[0][1].envs["BASE_MODEL"] == "from-flag"
    invoke("up", "task.yaml", "-c", "b", "--env", "BASE_MODEL", provider=provider)
    assert provider.launched[1][1].envs["BASE_MODEL"] == "from-environment"
    for wrong, why in (
        ("ABSENT", "`ABSENT` is not set in the environment"),
        ("1=2", "is not NAME"),
    ):
        result = invoke("up", "task.yaml", "--env", wrong, provider=provider)
        assert result.exit_code == 2 and why in result.stderr


def test_a_named_env_file_reaches_settings_task_and_secrets(
    invoke: Invoke, healthy_port: int
) -> None:
    Path("task.yaml").write_text(TASK.replace("tiny-random", "tiny-random, STEPS: 3"))
    text = "BASE_MODEL=mine\nSTEPS=5\nOPENAI_API_KEY=sk\nHF_TOKEN=hf\nWANDB_API_KEY=w\n"
    Path("prod.env").write_text(text)
    provider = FakeProvider(port=healthy_port)
    assert invoke("up", "task.yaml", "--env-file", "prod.env", provider=provider).exit_code == 0
    task = provider.launched[0][1]
    assert (task.envs["BASE_MODEL"], task.envs["STEPS"]) == ("mine", "5")
    assert task.secrets == {
        "OPENAI_API_KEY": "sk",
        "HF_TOKEN": "hf",
    }
    Path("prod.env").rename(".env")  # read for settings only, because it is there for every task
    invoke("up", "task.yaml", "-c", "b", provider=provider)
    assert provider.launched[1][1].secrets == {"HF_TOKEN": "hf"}


def test_the_lease_options_reach_the_task(invoke: Invoke, healthy_port: int) -> None:
    provider = FakeProvider(port=healthy_port)
    result = invoke("up", "task.yaml", "--max-hours", "2", "--max-cost", "9", provider=provider)
    task = provider.launched[0][1]
    assert (task.envs["ART_MAX_HOURS"], task.max_cost) == ("2", 9.0)
    assert "ends by itself after 30 idle minutes or after 2 hours or at $9.00" in result.stderr
    result = invoke("up", "task.yaml", "--no-lease", "-c", "b", provider=provider)
    assert "No lease: the cluster runs" in result.stderr


def test_two_launches_of_one_cluster_at_once_are_refused(invoke: Invoke, healthy_port: int) -> None:
    from launcher.state import launch_lock

    with launch_lock("art"):
        result = invoke("up", "task.yaml", provider=FakeProvider(port=healthy_port))
    assert result.exit_code == 1
    assert "error: Another command is already launching cluster `art`" in result.stderr
    assert invoke("up", "task.yaml", provider=FakeProvider(port=healthy_port)).exit_code == 0


def test_the_tasks_of_the_kit_are_listed_and_shown(invoke: Invoke, provider: FakeProvider) -> None:
    listed = invoke("tasks", provider=provider).stdout.splitlines()
    assert "art\tServe and train one model on one GPU" in "\n".join(listed)
    named = [row["name"] for row in json.loads(invoke("tasks", "--json", provider=provider).stdout)]
    assert named == [line.split("\t")[0] for line in listed]
    shown = invoke("tasks", "show", "art-cpu", provider=provider).stdout
    assert shown == (Path(__file__).parents[2] / "sky/art-cpu.yaml").read_text()
    result = invoke("tasks", "show", "nope", provider=provider)
    assert result.exit_code == 1 and "no packaged task of that name" in result.stderr


@pytest.mark.parametrize("given", [[], ["art"], ["sky/art.yaml"]])
def test_up_without_a_file_of_yours_launches_a_packaged_task(
    given: list[str], invoke: Invoke, healthy_port: int
) -> None:
    provider = FakeProvider(port=healthy_port)
    assert invoke("up", *given, provider=provider).exit_code == 0
    ((_, task, _),) = provider.launched
    assert task.name == "art"
    assert any(place.startswith("~/.art-cluster/kits/") for place in task.config["file_mounts"])


def test_up_prefers_a_file_of_yours(invoke: Invoke, healthy_port: int) -> None:
    Path("sky").mkdir()
    Path("sky/art.yaml").write_text(TASK)
    provider = FakeProvider(port=healthy_port)
    assert invoke("up", provider=provider).exit_code == 0
    assert provider.launched[0][1].name == "demo"
