"""Plans of launches. No SkyPilot is needed: a plan is a pure function of what it is given."""

from pathlib import Path
from typing import Any

import pytest

from launcher.provider import SETUP
from launcher.skypilot.plan import (
    LaunchPlan,
    Route,
    plan_launch,
    requested_clouds,
    shared_resources,
)
from launcher.task import Task

NO_OPTIONS: dict[str, Any] = {
    **dict.fromkeys(("infra", "cloud", "cpus", "memory", "gpus", "instance_type")),
    **dict.fromkeys(("name", "num_nodes", "env_file", "secret_file")),
    **dict.fromkeys(("no_setup", "fast", "dryrun"), False),
    **dict.fromkeys(("env", "secret"), ()),
}
CPUS = {"cpus": "4+", "memory": "8+", "autostop": {"idle_minutes": 5}}
GPU = {"ordered": [{"accelerators": "H100:1"}, {"accelerators": "A100-80GB:1", "infra": "aws"}]}


def plan(
    config: dict[str, Any] | None = None,
    *,
    cluster_status: str | None = None,
    clouds: tuple[str, ...] = ("aws",),
    max_cost: float | None = None,
    **options: Any,
) -> LaunchPlan:
    config = {"resources": CPUS, "setup": "echo set up", "run": "echo serve", **(config or {})}
    task = Task(Path("sky/demo.yaml"), config, envs={}, secrets={}, max_cost=max_cost)
    return plan_launch(
        task, {**NO_OPTIONS, **options}, cluster_status=cluster_status, clouds=clouds
    )


def test_a_new_cluster_takes_one_request_whose_job_sets_up_and_serves() -> None:
    made = plan({"workdir": "project"}, env=[("A", "1")], secret=[("HF_TOKEN", "hf_x")])
    assert made.route is Route.ONE_REQUEST
    config = made.launch_config()
    assert set(config) == {"name", "num_nodes", "resources", "run", "workdir"}
    assert (config["name"], config["num_nodes"], config["resources"]) == ("demo", 1, CPUS)
    assert "echo set up" in config["run"] and "bash -c 'echo serve'" in config["run"]
    assert (made.envs, made.secrets) == ({"A": "1"}, {"HF_TOKEN": "hf_x"})
    assert "hf_x" not in f"{made}{config}"
    assert made.workdir == Path("project")


@pytest.mark.parametrize(
    "given",
    [
        {"cluster_status": "UP"},
        {"cluster_status": "INIT"},
        {"max_cost": 2.0},
        {"clouds": ("slurm", "aws")},
        {"clouds": ("slurm",), "cpus": "8"},
    ],
    ids=str,
)
def test_otherwise_the_cluster_comes_first_and_a_second_job_sets_up_and_serves(given: Any) -> None:
    made = plan(**given)
    assert made.route is Route.TWO_REQUESTS
    assert made.launch_config() == {"resources": CPUS}
    server = made.server_config({"cpus": 3})
    assert (server["name"], server["num_nodes"], server["resources"]) == ("demo", 1, {"cpus": 3})
    assert "echo set up" in server["run"] and "bash -c 'echo serve'" in server["run"]
    # Hours that were bought with dollars also pay for the setup.
    assert ("left - SECONDS" in server["run"]) == ("max_cost" in given)


@pytest.mark.parametrize("cluster_status", [None, "UP"])
def test_several_machines_are_all_set_up_before_the_server_starts(
    cluster_status: str | None,
) -> None:
    made = plan(num_nodes=2, name="mine", cluster_status=cluster_status)
    assert made.route is Route.SETUP_FIRST
    config = made.launch_config()
    assert config.keys() == {"resources", "setup"} and config["resources"] == CPUS
    assert "timeout --kill-after=30 $limit bash -c 'echo set up'" in config["setup"]
    assert (made.name_option, made.run_name) == (SETUP, "mine")
    server = made.server_config({})
    assert (server["name"], server["num_nodes"]) == ("mine", 2)
    assert "echo set up" not in server["run"] and "bash -c 'echo serve'" in server["run"]


@pytest.mark.parametrize(
    ("options", "cluster_status", "route"),
    [
        ({"no_setup": True}, None, Route.ONE_REQUEST),
        ({"no_setup": True}, "UP", Route.TWO_REQUESTS),
        ({"fast": True}, "UP", Route.TWO_REQUESTS),
    ],
)
def test_a_skipped_setup_is_in_no_request(
    options: dict[str, Any], cluster_status: str | None, route: Route
) -> None:
    made = plan({"num_nodes": 2}, cluster_status=cluster_status, **options)
    assert (made.route, made.setup, made.name_option) == (route, None, None)
    assert "echo set up" not in str(made.launch_config())
    assert "echo set up" not in made.server_config({})["run"]


@pytest.mark.parametrize("cluster_status", [None, "INIT"])
def test_fast_does_not_skip_the_setup_of_a_cluster_that_is_not_up(
    cluster_status: str | None,
) -> None:
    assert plan(fast=True, cluster_status=cluster_status).setup == "echo set up"


def test_options_win_over_the_task_and_single_values_over_files() -> None:
    made = plan(
        {"name": "theirs", "num_nodes": 3, "setup": None, "workdir": {"url": "https://x"}},
        name="mine",
        num_nodes=2,
        env_file={"A": "file", "B": "file"},
        env=[("A", "option")],
        secret_file={"S": "file"},
        dryrun=True,
    )
    assert (made.run_name, made.name_option, made.num_nodes) == ("mine", "mine", 2)
    assert (made.envs, made.secrets) == ({"A": "option", "B": "file"}, {"S": "file"})
    assert made.dry_run
    assert made.workdir is None and made.launch_config()["workdir"] == {"url": "https://x"}


def shared(
    resources: dict[str, Any], options: dict[str, str], enabled: list[str]
) -> dict[str, Any] | None:
    options = {**NO_OPTIONS, **options}
    return shared_resources(resources, options, requested_clouds(resources, options) or enabled)


@pytest.mark.parametrize(
    ("resources", "options", "enabled"),
    [
        (GPU, {}, ["aws", "gcp"]),
        (CPUS, {"infra": "k8s/mine"}, ["slurm"]),
        (CPUS, {"cloud": "AWS"}, ["slurm"]),
        ({**CPUS, "infra": "aws/*/us-east-1a"}, {}, ["slurm"]),
        ({"any_of": [{"infra": "aws"}, {"infra": "gcp"}]}, {}, ["slurm"]),
    ],
)
def test_outside_slurm_every_job_leaves_a_cpu_for_runs(
    resources: Any, options: dict[str, str], enabled: list[str]
) -> None:
    assert shared(resources, options, enabled) == resources


@pytest.mark.parametrize(
    ("resources", "options", "place"),
    [
        (CPUS, {}, {"infra": "slurm"}),
        (CPUS, {"infra": "slurm/lab"}, {"infra": "slurm"}),
        ({**CPUS, "infra": "slurm/lab"}, {}, {}),
        ({**CPUS, "cloud": "slurm"}, {}, {}),
    ],
)
def test_on_slurm_the_cluster_has_one_cpu_more_than_the_job(
    resources: Any, options: dict[str, str], place: dict[str, str]
) -> None:
    expected = {**resources, **place, "instance_type": "4CPU--8GB", "cpus": "3+"}
    assert shared(resources, options, ["Slurm"]) == expected


@pytest.mark.parametrize(
    ("resources", "options", "enabled"),
    [
        (CPUS, {}, ["slurm", "aws"]),
        (CPUS, {"infra": "*"}, ["slurm", "aws"]),
        (CPUS, {}, []),
        (CPUS, {"cpus": "8"}, ["slurm"]),
        ({"cpus": 1, "memory": 4}, {}, ["slurm"]),
        ({"cpus": 4}, {}, ["slurm"]),
        ({"cpus": 2.5, "memory": 4}, {}, ["slurm"]),
        ({**CPUS, "accelerators": "H100:1"}, {}, ["slurm"]),
        (GPU, {}, ["slurm"]),
        ({}, {}, ["slurm"]),
    ],
)
def test_nothing_is_promised_if_only_the_launch_itself_can_tell(
    resources: Any, options: dict[str, str], enabled: list[str]
) -> None:
    assert shared(resources, options, enabled) is None
