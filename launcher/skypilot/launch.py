"""A launch with SkyPilot, until setup and server are a job of the cluster's queue."""

import contextlib
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from launcher.errors import LauncherError, ProviderError
from launcher.files import remember, select
from launcher.lease import hours_within
from launcher.provider import SETUP, Cost, Run, RunStatus, live_server
from launcher.skypilot import runs as sky_runs
from launcher.skypilot import scripts
from launcher.skypilot.door import ANY, launch_command, parse, sky, translated
from launcher.skypilot.resources import with_room
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
    """See `Provider.launch`: in one request where that is possible, and otherwise in two.

    One makes the cluster and starts setup and server as its job. Two are needed where that job
    would leave no room for a run, where the price of the cluster decides how long the server may
    live, where several machines are to be set up first, and where the cluster is there already.
    """
    command, record = launch_command(), _record(name)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / f"{task.path.stem}.yaml"
        context = parse(command, [*_own_arguments(name, task, path), *arguments])
        given: dict[str, Any] = dict(context.params)
        envs = {**(given["env_file"] or {}), **dict(given["env"])}
        secrets = {**(given["secret_file"] or {}), **dict(given["secret"])}
        nodes = given["num_nodes"] or task.config.get("num_nodes") or 1
        job: dict[str, Any] = {"name": given["name"] or task.name, "num_nodes": nodes}
        setup = None if _skips_setup(given, record) else task.config.get("setup")
        config = {key: value for key, value in task.config.items() if key not in ("run", "setup")}
        # SkyPilot lets no machine start before every one is set up; one script cannot.
        apart = setup is not None and nodes > 1
        setting_up = _setting_up(name) if apart and record is not None else None
        if apart:
            config["setup"] = setup
            context.params["name"] = SETUP  # of its job, which nobody takes for the server then
        resources = None
        if record is None and not apart and task.max_cost is None:
            resources = with_room(task.config.get("resources") or {}, given, _clouds)
        if resources is not None:
            run = scripts.server(task.config["run"], setup, envs, hours_include_setup=False)
            config |= {**job, "resources": resources, "run": run}
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        if setting_up is None:
            _invoke(name, command, context)
    if given["dryrun"]:
        return None
    reachable()
    workdir = task.config.get("workdir")
    if isinstance(workdir, str):  # else it is a git repository, of which nothing was sent
        remember(sent_record(name), Path(workdir), select(Path(workdir)))
    if resources is not None:
        return _launched(name, job["name"])
    if apart:
        _wait_for_setup(name, setting_up or _launched(name, SETUP))
        setup = None
    dollars = task.max_cost
    if dollars is not None:
        envs["ART_MAX_HOURS"] = _hours_within(cost(name), dollars, envs)
    run = scripts.server(task.config["run"], setup, envs, hours_include_setup=dollars is not None)
    return sky_runs.start(name, {**job, "resources": _share(name), "run": run}, envs, secrets)


def resume(name: str) -> Run | None:
    """See `Provider.resume`.

    SkyPilot finishes what it was asked for, and a second launch beside it starts a second server.
    """
    skypilot, asked = sky(), _requests(name)
    if not asked:
        return None
    for request in asked:
        with contextlib.suppress(LauncherError), translated(name):
            skypilot.stream_and_get(request)
    with contextlib.suppress(LauncherError):  # it came to nothing: this launch says why
        return live_server(sky_runs.runs(name))
    return None


def _own_arguments(name: str, task: Task, path: Path) -> list[str]:
    own = ["--yes", "--detach-run", "--cluster", name, str(path)]
    own += [part for item in task.envs.items() for part in ("--env", "=".join(item))]
    own += [part for item in task.secrets.items() for part in ("--secret", "=".join(item))]
    return own


def _skips_setup(given: Mapping[str, Any], record: Mapping[str, Any] | None) -> bool:
    """As `sky launch` does; `--fast` means a cluster that is up."""
    up = record is not None and record["status"].value == "UP"
    return bool(given["no_setup"] or (given["fast"] and up))


def _requests(name: str, **which: Any) -> list[str]:
    """Launches of a cluster that SkyPilot was asked for, newest first; by default not those over.

    An older API server tells of every cluster, whichever is asked for.
    """
    skypilot = sky()
    with translated(name):
        known = skypilot.api_status(cluster_name=name, **which)
    return [it.request_id for it in known if (it.name, it.cluster_name) == ("sky.launch", name)]


def _record(name: str) -> dict[str, Any] | None:
    """What SkyPilot knows of a cluster, without looking at it."""
    skypilot = sky()
    with translated(name):
        return next(iter(skypilot.get(skypilot.status([name]))), None)


def _clouds() -> list[str]:
    skypilot = sky()
    with translated(ANY):
        return [str(cloud) for cloud in skypilot.get(skypilot.client.sdk.enabled_clouds())]


def _invoke(name: str, command: Any, context: Any) -> None:
    """Run SkyPilot's own `sky launch` in this process.

    It knows every argument and writes the ssh alias, and values given so are in no `ps`.
    """
    try:
        with translated(name), context:
            command.invoke(context)
    except SystemExit as exc:  # how SkyPilot's command ends, well or not
        if exc.code:
            raise ProviderError(f"`sky launch` of cluster `{name}` failed") from exc


def _launched(name: str, label: str) -> Run:
    """The job that the newest launch started, which SkyPilot's command tells to people only."""
    skypilot, (newest, *_) = sky(), _requests(name, all_status=True, limit=50)
    with translated(name):
        job_id, *_ = skypilot.get(newest)
    return Run(str(job_id), label, RunStatus.PENDING)


def _hours_within(cost: Cost, max_cost: float, envs: Mapping[str, str]) -> str:
    hours = float(envs.get("ART_MAX_HOURS") or 0)
    left = hours_within(max_cost, so_far=cost.so_far, per_hour=cost.per_hour, hours=hours)
    return format(left, "g")


def _setting_up(name: str) -> Run | None:
    """The setup of a launch whose launcher did not live to start the server after it."""
    with contextlib.suppress(LauncherError):  # not up: this launch makes it so, or says why
        alive = [run for run in sky_runs.runs(name) if not run.status.over]
        return next((run for run in alive if run.name == SETUP), None)
    return None


def _wait_for_setup(name: str, run: Run) -> None:
    """Show the setup to its end."""
    skypilot = sky()
    with translated(name):
        code = skypilot.tail_logs(name, int(run.id), follow=True, output_stream=sys.stderr)
    if code:
        raise ProviderError(
            f"The setup of cluster `{name}` failed",
            hint=f"Its output is above; mend it and launch again, or `launcher down -c {name}`",
        )


def _share(name: str) -> dict[str, Any]:
    """What the server asks of its cluster: the GPUs, and all CPUs but one."""
    record = _record(name)
    assert record is not None  # it was launched a moment ago
    launched = record["handle"].launched_resources
    share: dict[str, Any] = {}
    if launched.accelerators:
        share["accelerators"] = dict(launched.accelerators)
    if str(launched.cloud).lower() == "slurm" and launched.cpus:
        share["cpus"] = max(1, int(float(str(launched.cpus).rstrip("+"))) - 1)
    return share
