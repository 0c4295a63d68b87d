"""The plan of a launch: what SkyPilot gets, and in how many requests. It calls nothing itself."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from launcher.provider import SETUP
from launcher.skypilot import scripts
from launcher.task import Task

_UP = "UP"  # SkyPilot's status of a cluster that is up
_SIZES = ("accelerators", "instance_type", "ordered", "any_of")
_SIZE_OPTIONS = ("cpus", "memory", "gpus", "instance_type")


class Route(Enum):
    """The requests that a launch consists of."""

    ONE_REQUEST = "one request"
    """`sky launch` makes the cluster, and its job runs setup and server."""
    TWO_REQUESTS = "two requests"
    """`sky launch` makes or updates the cluster; a second job runs setup and server."""
    SETUP_FIRST = "setup first"
    """The job of `sky launch` sets up every machine; a second job runs the server."""


@dataclass(frozen=True)
class LaunchPlan:
    """What a launch sends to SkyPilot. The scripts and configs are derived from it."""

    task: Task
    route: Route
    run_name: str
    """Name of the server's run."""
    num_nodes: int
    setup: str | None
    """Script that prepares the machines; None when the task has none or it is skipped."""
    server_script: str
    """Script of the job that runs the server, with the setup unless that comes first."""
    resources: Mapping[str, Any] | None
    """Resources of a launch in one request; None on the other routes."""
    envs: Mapping[str, str]
    secrets: Mapping[str, str] = field(repr=False)
    name_option: str | None
    """`--name` of `sky launch`, which names the job that it starts."""
    dry_run: bool

    @property
    def workdir(self) -> Path | None:
        """The directory that `sky launch` sends; None if there is none or it comes from git."""
        workdir = self.task.config.get("workdir")
        return Path(workdir) if isinstance(workdir, str) else None

    def launch_config(self) -> dict[str, Any]:
        """The task that `sky launch` gets. It holds no secret."""
        ours = ("run", "setup")
        config = {key: value for key, value in self.task.config.items() if key not in ours}
        if self.resources is not None:
            return config | self.server_config(self.resources)
        if self.route is Route.SETUP_FIRST and self.setup:
            return config | {"setup": scripts.setup_first(self.setup)}
        return config

    def server_config(self, resources: Mapping[str, Any]) -> dict[str, Any]:
        """The task of the job that runs the server."""
        return {
            "name": self.run_name,
            "num_nodes": self.num_nodes,
            "resources": dict(resources),
            "run": self.server_script,
        }


def plan_launch(
    task: Task,
    options: Mapping[str, Any],
    *,
    cluster_status: str | None,
    clouds: Collection[str],
) -> LaunchPlan:
    """Plan a launch in one request if possible, and otherwise in two.

    Two are needed if several machines have to be set up first, if the cluster exists already, if
    its price decides how long the server may live, and if the job of `sky launch` would occupy the
    whole cluster.

    `options` are those of `sky launch`, by parameter name. `cluster_status` is SkyPilot's, or None
    if there is no such cluster. `clouds` are those that the launch may choose from.
    """
    num_nodes = options["num_nodes"] or task.config.get("num_nodes") or 1
    # Like `sky launch`, where `--fast` skips the setup only on a cluster that is up.
    skips_setup = options["no_setup"] or (options["fast"] and cluster_status == _UP)
    setup = None if skips_setup else task.config.get("setup")
    resources = None
    # No machine may serve before all are set up, and a script only knows about its own machine.
    setup_first = setup is not None and num_nodes > 1
    if cluster_status is None and not setup_first and task.max_cost is None:
        resources = shared_resources(task.config.get("resources") or {}, options, clouds)
    if setup_first:
        route = Route.SETUP_FIRST
    else:
        route = Route.TWO_REQUESTS if resources is None else Route.ONE_REQUEST
    return LaunchPlan(
        task=task,
        route=route,
        run_name=options["name"] or task.name,
        num_nodes=num_nodes,
        setup=setup,
        server_script=scripts.server(
            task.config["run"],
            None if setup_first else setup,
            hours_include_setup=task.max_cost is not None,
        ),
        resources=resources,
        envs={**(options["env_file"] or {}), **dict(options["env"])},
        secrets={**(options["secret_file"] or {}), **dict(options["secret"])},
        # A job of this name is not mistaken for the server.
        name_option=SETUP if setup_first else options["name"],
        dry_run=bool(options["dryrun"]),
    )


def requested_clouds(resources: Mapping[str, Any], options: Mapping[str, Any]) -> set[str]:
    """The clouds that the options or the task name; empty if any cloud will do."""
    if (cloud := _cloud(options)) is not None:
        return {cloud}
    alternatives = resources.get("ordered") or resources.get("any_of") or [{}]
    clouds = {_cloud({**resources, **alternative}) for alternative in alternatives}
    return set() if None in clouds else {cloud for cloud in clouds if cloud is not None}


def shared_resources(
    resources: Mapping[str, Any], options: Mapping[str, Any], clouds: Collection[str]
) -> dict[str, Any] | None:
    """Resources for a launch whose own job leaves a CPU for other runs; None if that is unknown.

    Outside Slurm a job occupies half a CPU. On Slurm it occupies all that its task requests, and
    that is the whole cluster, unless the task names an instance type: then this type is the size of
    the cluster, and the job may request less.
    """
    names = {cloud.lower() for cloud in clouds}
    if names and "slurm" not in names:
        return dict(resources)
    cpus, memory = _whole(resources.get("cpus")), _whole(resources.get("memory"))
    has_other_size = any(key in resources for key in _SIZES)
    has_size_option = any(options[option] for option in _SIZE_OPTIONS)
    if names != {"slurm"} or has_other_size or has_size_option or cpus < 2 or not memory:
        return None
    place = {} if {"infra", "cloud"} & set(resources) else {"infra": "slurm"}
    size = {"instance_type": f"{cpus}CPU--{memory}GB", "cpus": f"{cpus - 1}+"}
    return {**resources, **place, **size}


def _cloud(request: Mapping[str, Any]) -> str | None:
    """The cloud of `infra: aws/us-east-1` or `cloud: aws`, in lower case; None for any cloud."""
    name = str(request.get("infra") or request.get("cloud") or "*").split("/")[0].lower()
    return None if name == "*" else name


def _whole(amount: Any) -> int:
    """Return 4 for `4`, `"4"` and `"4+"`, and 0 for anything that is not a whole number."""
    found = re.fullmatch(r"(\d+)\+?", str(amount))
    return int(found[1]) if found else 0
