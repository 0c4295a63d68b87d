"""Launches with SkyPilot: collect what a plan depends on, then send the plan."""

import contextlib
import io
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from launcher.errors import ClusterNotFound, LauncherError, ProviderError
from launcher.files import record_sent, select, sendable
from launcher.lease import hours_within
from launcher.provider import SETUP, Cost, Run, RunStatus, live_server
from launcher.skypilot import runs as sky_runs
from launcher.skypilot.door import ANY, launch_command, parse, sky, translated
from launcher.skypilot.plan import LaunchPlan, Route, plan_launch, requested_clouds
from launcher.startup import quoted
from launcher.state import sent_record
from launcher.task import Task


def launch(
    name: str,
    task: Task,
    arguments: Sequence[str],
    *,
    reachable: Callable[[], None],
    cost: Callable[[str], Cost],
) -> Run | None:
    """See `Provider.launch`; `cost` returns the cost of a cluster by its name."""
    command, record = launch_command(), _record(name)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / f"{task.path.stem}.yaml"
        own_arguments = _own_arguments(name, task, path)
        context = parse(command, [*own_arguments, *arguments])
        status = None if record is None else record["status"].value
        clouds = requested_clouds(task.config.get("resources") or {}, context.params)
        if record is None and not clouds:
            clouds = _enabled_clouds()
        plan = plan_launch(task, context.params, cluster_status=status, clouds=clouds)
        setup_run = None
        if plan.route is Route.SETUP_FIRST and record is not None:
            setup_run = _interrupted_setup(name)
        if setup_run is None:
            config = plan.launch_config()
            if plan.workdir is not None:
                config["workdir"] = sendable(name, plan.workdir)
            path.write_text(yaml.safe_dump(config, sort_keys=False))
            context.params["name"] = plan.name_option
            _invoke(name, command, context)
    if plan.dry_run:
        return None
    reachable()
    if plan.workdir is not None:
        record_sent(sent_record(name), plan.workdir, select(plan.workdir))
    if plan.route is Route.ONE_REQUEST:
        return _launched_job(name, plan.run_name)
    if plan.route is Route.SETUP_FIRST:
        _wait_for_setup(name, setup_run or _launched_job(name, SETUP))
    return _start_server(name, plan, cost)


def nodes(name: str) -> int:
    """Return the number of a cluster's machines; 1 if there is no such cluster."""
    record = _record(name)
    return int(record["handle"].launched_nodes) if record else 1


def like(name: str) -> list[str]:
    """See `Provider.like`."""
    record = _record(name)
    if record is None:
        raise ClusterNotFound(f"There is no cluster `{name}`")
    launched = record["handle"].launched_resources
    cloud, cards = str(launched.cloud).lower(), dict(launched.accelerators or {})
    gpus = ",".join(f"{card}:{count:g}" for card, count in cards.items())
    arguments = ["--infra", "/".join(filter(None, (cloud, launched.region))), "--gpus"]
    arguments.append(gpus or "none")
    if not gpus or cloud == "slurm":  # elsewhere the machine comes with its GPUs
        sizes = {"--cpus": launched.cpus, "--memory": launched.memory}
        for option, size in sizes.items():
            arguments += [option, str(size)] if size else []
    return arguments


def resume(name: str) -> Run | None:
    """See `Provider.resume`.

    SkyPilot finishes a launch whose launcher is gone. A second launch at the same time would start
    a second server.
    """
    skypilot, requests = sky(), _launch_requests(name)
    if not requests:
        return None
    for request in requests:
        with contextlib.suppress(LauncherError), translated(name):
            skypilot.stream_and_get(request)
    with contextlib.suppress(LauncherError):  # it failed: the launch that follows says why
        return live_server(sky_runs.runs(name))
    return None


def _start_server(name: str, plan: LaunchPlan, cost: Callable[[str], Cost]) -> Run:
    """Start the server as a second job, on a cluster that is up."""
    envs = dict(plan.envs)
    if plan.task.max_cost is not None:
        envs["ART_MAX_HOURS"] = _hours_within(cost(name), plan.task.max_cost, envs)
    return sky_runs.start(name, plan.server_config(_server_share(name)), envs, plan.secrets)


def _own_arguments(name: str, task: Task, path: Path) -> list[str]:
    arguments = ["--yes", "--detach-run", "--cluster", name, str(path)]
    for variable, value in task.envs.items():
        arguments += ["--env", f"{variable}={value}"]
    for variable, value in task.secrets.items():
        arguments += ["--secret", f"{variable}={value}"]
    return arguments


def _launch_requests(name: str, **filters: Any) -> list[str]:
    """Ids of the launch requests for a cluster, newest first; by default unfinished ones only.

    An older API server returns the requests for every cluster.
    """
    skypilot = sky()
    with translated(name):
        requests = skypilot.api_status(cluster_name=name, **filters)
    return [it.request_id for it in requests if (it.name, it.cluster_name) == ("sky.launch", name)]


def _record(name: str) -> Mapping[str, Any] | None:
    """SkyPilot's record of a cluster, without a refresh."""
    skypilot = sky()
    with translated(name):
        return next(iter(skypilot.get(skypilot.status([name]))), None)


def _enabled_clouds() -> set[str]:
    """All clouds that SkyPilot has credentials for."""
    skypilot = sky()
    with translated(ANY):
        return {str(cloud) for cloud in skypilot.get(skypilot.client.sdk.enabled_clouds())}


def _invoke(name: str, command: Any, context: Any) -> None:
    """Run SkyPilot's own `sky launch` in this process.

    It knows every argument and writes the ssh alias, and `ps` does not show the values.
    """
    try:
        with translated(name), context:
            command.invoke(context)
    except SystemExit as exc:  # SkyPilot's command always ends this way
        if exc.code:
            raise ProviderError(f"`sky launch` of cluster `{name}` failed") from exc


def _launched_job(name: str, run_name: str) -> Run:
    """The job of the newest launch. SkyPilot's command only prints its id."""
    skypilot, (newest, *_) = sky(), _launch_requests(name, all_status=True, limit=50)
    with translated(name):
        job_id, *_ = skypilot.get(newest)
    return Run(str(job_id), run_name, RunStatus.PENDING)


def _hours_within(cost: Cost, max_cost: float, envs: Mapping[str, str]) -> str:
    hours = float(envs.get("ART_MAX_HOURS") or 0)
    left = hours_within(max_cost, so_far=cost.so_far, per_hour=cost.per_hour, hours=hours)
    return format(left, "g")


def _interrupted_setup(name: str) -> Run | None:
    """The running setup of a launch whose launcher was killed before it started the server."""
    with contextlib.suppress(LauncherError):  # not up: this launch brings it up, or says why not
        running = [run for run in sky_runs.runs(name) if not run.status.over]
        return next((run for run in running if run.name == SETUP), None)
    return None


def _wait_for_setup(name: str, run: Run) -> None:
    """Show the output of the setup until it ends."""
    skypilot, shown = sky(), _Shown()
    with translated(name):
        code = skypilot.tail_logs(name, int(run.id), follow=True, output_stream=shown)
    if code:
        raise ProviderError(
            f"The setup of cluster `{name}` failed{quoted(shown.end.splitlines())}",
            hint="Its output is above; fix it and launch again, "
            f"or end the cluster with `launcher down -c {name}`",
        )


class _Shown(io.TextIOBase):
    """Writes to stderr, and remembers the end of it."""

    end = ""

    def write(self, text: str) -> int:
        self.end = (self.end + text)[-20_000:]
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def _server_share(name: str) -> dict[str, Any]:
    """The resources that the server requests from its cluster: the GPUs, and all CPUs but one."""
    record = _record(name)
    assert record is not None  # it was launched a moment ago
    launched = record["handle"].launched_resources
    share: dict[str, Any] = {}
    if launched.accelerators:
        share["accelerators"] = dict(launched.accelerators)
    if str(launched.cloud).lower() == "slurm" and launched.cpus:
        share["cpus"] = max(1, int(float(str(launched.cpus).rstrip("+"))) - 1)
    return share
