"""Whether a run fits beside the job of a launch, before anybody launches."""

from typing import Any

import pytest

from launcher.skypilot.resources import with_room

NOTHING = dict.fromkeys(("infra", "cloud", "cpus", "memory", "gpus", "instance_type"))
CPUS = {"cpus": "4+", "memory": "8+", "autostop": {"idle_minutes": 5}}
GPU = {"ordered": [{"accelerators": "H100:1"}, {"accelerators": "A100-80GB:1", "infra": "aws"}]}


@pytest.mark.parametrize(
    ("resources", "given", "clouds"),
    [
        (GPU, {}, ["aws", "gcp"]),
        (CPUS, {"infra": "k8s/mine"}, ["slurm"]),
        (CPUS, {"cloud": "AWS"}, ["slurm"]),
        ({**CPUS, "infra": "aws/*/us-east-1a"}, {}, ["slurm"]),
        ({"any_of": [{"infra": "aws"}, {"infra": "gcp"}]}, {}, ["slurm"]),
    ],
)
def test_off_slurm_every_job_leaves_room(
    resources: Any, given: dict[str, str], clouds: list[str]
) -> None:
    assert with_room(resources, {**NOTHING, **given}, lambda: clouds) == resources


@pytest.mark.parametrize(
    ("resources", "given", "place"),
    [
        (CPUS, {}, {"infra": "slurm"}),
        (CPUS, {"infra": "slurm/lab"}, {"infra": "slurm"}),
        ({**CPUS, "infra": "slurm/lab"}, {}, {}),
        ({**CPUS, "cloud": "slurm"}, {}, {}),
    ],
)
def test_on_slurm_the_cluster_has_a_cpu_more_than_the_job(
    resources: Any, given: dict[str, str], place: dict[str, str]
) -> None:
    wanted = {**resources, **place, "instance_type": "4CPU--8GB", "cpus": "3+"}
    assert with_room(resources, {**NOTHING, **given}, lambda: ["Slurm"]) == wanted


@pytest.mark.parametrize(
    ("resources", "given", "clouds"),
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
def test_where_only_the_launch_can_tell_nothing_is_promised(
    resources: Any, given: dict[str, str], clouds: list[str]
) -> None:
    assert with_room(resources, {**NOTHING, **given}, lambda: clouds) is None
