"""The door to SkyPilot: the only module that imports `sky`, and the place its errors become ours.

SkyPilot's SDK only queues: every call returns a request id, and its errors surface in `sky.get`.
"""

import contextlib
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import yaml

from kit.errors import KitError, NotInstalled
from launcher.errors import ClusterNotFound, LauncherError, NoCapacity, ProviderError
from launcher.provider import WORKDIR, ClusterInfo, Run, RunStatus
from launcher.remote import Remote
from launcher.task import Task

# Before SkyPilot is imported: it reads this once. Whoever wants to report usage sets it to 0.
os.environ.setdefault("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")

_ERRORS: dict[str, type[LauncherError]] = {
    "ClusterDoesNotExist": ClusterNotFound,
    "ResourcesUnavailableError": NoCapacity,
    "ResourcesMismatchError": NoCapacity,
    "NoCloudAccessError": NoCapacity,
}
_STATUS = {
    "INIT": RunStatus.PENDING,
    "PENDING": RunStatus.PENDING,
    "SETTING_UP": RunStatus.RUNNING,
    "RUNNING": RunStatus.RUNNING,
    "SUCCEEDED": RunStatus.SUCCEEDED,
    "CANCELLED": RunStatus.CANCELLED,
}
_EXIT_CODES = ".art-cluster/exit-codes"
# A login shell finds `trainer`. On Slurm that shell reads the account's own .bashrc, where
# SkyPilot's line has moved HOME to the cluster's directory by then.
_ACTIVATE = """
line='[ ! -f ~/sky_workdir/.venv/bin/activate ] || . ~/sky_workdir/.venv/bin/activate'
rc=$(getent passwd "$(id -u)" | cut -d: -f6)/.bashrc
grep -qxF "$line" "$rc" 2>/dev/null || printf '%s\\n' "$line" >>"$rc"
"""
# Finished checkpoints only: the server writes into a directory whose name starts with a dot.
_CHECKPOINTS = (
    "--include=/*/",
    "--include=/*/models/",
    "--include=/*/models/*/",
    "--include=/*/models/*/checkpoints/",
    "--include=/*/models/*/checkpoints/[0-9]*/***",
    "--exclude=*",
    "--prune-empty-dirs",
)


class SkyProvider:
    """Clusters that SkyPilot rents: on a cloud, on Kubernetes or on Slurm."""

    def launch(self, name: str, task: Task, arguments: Sequence[str]) -> Run | None:
        # Without its `run`: on Slurm a cluster's first job holds every CPU of it for as long as it
        # lasts, and nothing could run beside a server that is that job.
        config = {key: value for key, value in task.config.items() if key != "run"}
        before = self._runs_if_any(name)
        given = self._launch(name, task, config, arguments)
        if given["dryrun"] or given["async_call"]:
            return None
        Remote(name).run(_ACTIVATE)
        for setup in self.runs(name)[len(before) :]:
            self._wait_for_setup(name, setup)
        server = {
            "name": given["name"] or task.name,
            "num_nodes": given["num_nodes"] or task.config.get("num_nodes") or 1,
            "resources": self._share(name),
            "run": f"cd ~/{WORKDIR}\n{task.config['run']}",
        }
        envs = {**(given["env_file"] or {}), **dict(given["env"])}
        secrets = {**(given["secret_file"] or {}), **dict(given["secret"])}
        return self._exec(name, server, envs, secrets)

    def _launch(
        self, name: str, task: Task, config: Mapping[str, Any], arguments: Sequence[str]
    ) -> Mapping[str, Any]:
        """Run SkyPilot's own `sky launch` in this process and return its parsed arguments.

        It knows every argument and writes the ssh alias, and values given so are in no `ps`.
        """
        launch = _launch_command()
        with tempfile.TemporaryDirectory() as directory, _translated(name):
            path = Path(directory) / f"{task.path.stem}.yaml"
            path.write_text(yaml.safe_dump(dict(config), sort_keys=False))
            own = ["--yes", "--detach-run", "--cluster", name, str(path)]
            own += [part for item in task.envs.items() for part in ("--env", "=".join(item))]
            own += [part for item in task.secrets.items() for part in ("--secret", "=".join(item))]
            context = _parse(launch, [*own, *arguments])
            try:
                with context, _output_to_stderr():
                    launch.invoke(context)
            except SystemExit as exc:  # how SkyPilot's command ends, well or not
                if exc.code:
                    raise ProviderError(f"`sky launch` of cluster `{name}` failed") from exc
        return dict(context.params)

    def _wait_for_setup(self, name: str, setup: Run) -> None:
        self.logs(name, setup.id, follow=True, tail=0, out=sys.stderr)
        if self._find(name, setup.id).status is not RunStatus.SUCCEEDED:
            raise ProviderError(
                f"The setup of cluster `{name}` failed",
                hint=f"Its output is above; mend it and launch again, or `launcher down -c {name}`",
            )

    def _share(self, name: str) -> dict[str, Any]:
        """What the server asks of its cluster: the GPUs, and all CPUs but one."""
        sky = _sky()
        with _translated(name):
            launched = sky.get(sky.status([name]))[0]["handle"].launched_resources
        share: dict[str, Any] = {}
        if launched.accelerators:
            share["accelerators"] = dict(launched.accelerators)
        if str(launched.cloud).lower() == "slurm" and launched.cpus:
            share["cpus"] = max(1, int(float(str(launched.cpus).rstrip("+"))) - 1)
        return share

    def clusters(self) -> list[ClusterInfo]:
        sky = _sky()
        with _translated("*"):
            records = sky.get(sky.status())
        return [
            ClusterInfo(
                record["name"],
                record["status"].value.lower(),
                f"{record['cloud']} {record['region'] or ''} {record['resources_str']}",
            )
            for record in records
        ]

    def run(
        self, name: str, command: str, envs: Mapping[str, str], secrets: Mapping[str, str]
    ) -> Run:
        # SkyPilot tells whether a job failed, not with which code. One CPU is asked for: a job that
        # wants the server's GPU would wait for it for ever.
        script = (
            f"bash -c {shlex.quote(command)}\ncode=$?\nmkdir -p ~/{_EXIT_CODES}\n"
            f"echo $code >~/{_EXIT_CODES}/$SKYPILOT_INTERNAL_JOB_ID\nexit $code\n"
        )
        return self._exec(
            name, {"name": "run", "resources": {"cpus": 1}, "run": script}, envs, secrets
        )

    def _exec(
        self,
        name: str,
        config: dict[str, Any],
        envs: Mapping[str, str],
        secrets: Mapping[str, str],
    ) -> Run:
        sky, label = _sky(), config["name"]  # SkyPilot empties the mapping it is given
        with _translated(name), _output_to_stderr():
            task = sky.Task.from_yaml_config(
                config, env_overrides=list(envs.items()), secrets_overrides=list(secrets.items())
            )
            job_id, _ = sky.get(sky.exec(task, cluster_name=name))
        return Run(str(job_id), label, RunStatus.PENDING)

    def runs(self, name: str) -> list[Run]:
        sky = _sky()
        with _translated(name):
            records = sky.get(sky.queue(name))
        return [
            Run(
                str(record["job_id"]),
                record["job_name"],
                _STATUS.get(record["status"].value, RunStatus.FAILED),
            )
            for record in sorted(records, key=lambda record: int(record["job_id"]))
        ]

    def _runs_if_any(self, name: str) -> list[Run]:
        with contextlib.suppress(LauncherError):
            return self.runs(name)
        return []

    def _find(self, name: str, run_id: str) -> Run:
        return next(run for run in self.runs(name) if run.id == run_id)

    def exit_code(self, name: str, run_id: str) -> int:
        text = Remote(name).run(f"cat ~/{_EXIT_CODES}/{int(run_id)} 2>/dev/null || echo 1")
        return int(text)

    def logs(self, name: str, run_id: str, *, follow: bool, tail: int, out: TextIO) -> None:
        sky = _sky()
        with _translated(name):
            sky.tail_logs(name, int(run_id), follow=follow, tail=tail, output_stream=out)

    def fetch(self, name: str, source: str, to: Path, *, checksum: bool) -> None:
        remote = Remote(name)
        if remote.run(f"[ ! -d {source} ] || echo yes").strip() != "yes":
            return  # nothing was trained yet
        remote.fetch(source, to, [*_CHECKPOINTS, *(["--checksum"] if checksum else [])])

    def tunnel(
        self, name: str, ports: Mapping[int, int]
    ) -> contextlib.AbstractContextManager[Mapping[int, int]]:
        return Remote(name).tunnel(ports)

    def down(self, name: str) -> None:
        sky = _sky()
        with contextlib.suppress(ClusterNotFound), _translated(name), _output_to_stderr():
            sky.get(sky.down(name))
        from sky.utils.cluster_utils import SSHConfigHelper

        SSHConfigHelper.remove_cluster(name)


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part arguments of `sky launch` into the positional ones and the options with their values."""
    positional = list(_parse(_launch_command(), list(arguments)).params["entrypoint"])
    options = list(arguments)
    for value in positional:
        last = len(options) - 1 - options[::-1].index(value)  # options may hold the same word
        del options[last]
    return positional, options


def _sky() -> Any:
    import sky

    if getattr(sky, "__file__", None) is None:
        # Our folder of task YAMLs, which Python takes for a package where SkyPilot is absent.
        raise NotInstalled("SkyPilot is not installed", hint="Install it with `scripts/install`")
    return sky


def _launch_command() -> Any:
    _sky()
    from sky.client.cli import command

    return command.launch


def _parse(launch: Any, arguments: list[str]) -> Any:
    import click

    try:
        return launch.make_context("sky launch", arguments)
    except click.ClickException as exc:
        raise LauncherError(
            f"`sky launch` does not take these arguments: {exc.format_message()}",
            hint="See what it takes with `sky launch --help`",
        ) from exc


@contextlib.contextmanager
def _translated(cluster: str) -> Iterator[None]:
    """Turn SkyPilot's errors into ours, keeping the original as the cause."""
    try:
        yield
    except (KitError, KeyboardInterrupt):
        raise
    except Exception as exc:
        error = _ERRORS.get(type(exc).__name__, ProviderError)
        if error is ClusterNotFound:
            raise error(f"There is no cluster `{cluster}`") from exc
        lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
        what = lines[0] if lines else type(exc).__name__
        raise error(f"Cluster `{cluster}`: {what}") from exc


@contextlib.contextmanager
def _output_to_stderr() -> Iterator[None]:
    """What SkyPilot prints is for people, and stdout is for data."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
