"""Clusters that SkyPilot rents, through `sky_door`, and reaches by ssh, through `remote`."""

import contextlib
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import yaml

from launcher.errors import ClusterNotFound, LauncherError, ProviderError
from launcher.files import forgotten, remember, select
from launcher.lease import hours_within
from launcher.provider import WORKDIR, Check, ClusterInfo, Cost, Progress, Run, RunStatus, Sent
from launcher.remote import Remote
from launcher.sky_door import (
    forget_alias,
    launch_command,
    parse,
    sky,
    translated,
)
from launcher.state import sent_record
from launcher.task import Task

_STATUS = {
    "INIT": RunStatus.PENDING,
    "PENDING": RunStatus.PENDING,
    "SETTING_UP": RunStatus.RUNNING,
    "RUNNING": RunStatus.RUNNING,
    "SUCCEEDED": RunStatus.SUCCEEDED,
    "CANCELLED": RunStatus.CANCELLED,
}
_EXIT_CODES = ".art-cluster/exit-codes"
_LEASE_ENDS = ".art-cluster/lease-ends"
# Part of every setup: a login shell finds `trainer`. On Slurm that shell reads the account's own
# .bashrc, where SkyPilot's line has moved HOME to the cluster's directory by then.
_ACTIVATE = """
line='[ ! -f ~/sky_workdir/.venv/bin/activate ] || . ~/sky_workdir/.venv/bin/activate'
rc=$(getent passwd "$(id -u)" | cut -d: -f6)/.bashrc
grep -qxF "$line" "$rc" 2>/dev/null || printf '%s\\n' "$line" >>"$rc"
"""


class SkyProvider:
    """Clusters that SkyPilot rents: on a cloud, on Kubernetes or on Slurm."""

    def launch(self, name: str, task: Task, arguments: Sequence[str]) -> Run | None:
        # Without its `run`: on Slurm a cluster's first job holds every CPU of it for as long as it
        # lasts, and nothing could run beside a server that is that job.
        config = {key: value for key, value in task.config.items() if key != "run"}
        config["setup"] = _ACTIVATE + (task.config.get("setup") or "")
        given = self._launch(name, task, config, arguments)
        if given["dryrun"] or given["async_call"]:
            return None
        if workdir := task.config.get("workdir"):
            remember(sent_record(name), Path(workdir), select(Path(workdir)))
        if not (given["no_setup"] or given["fast"]):
            self._wait_for_setup(name)
        envs = {**(given["env_file"] or {}), **dict(given["env"])}
        secrets = {**(given["secret_file"] or {}), **dict(given["secret"])}
        if task.max_cost is not None:
            envs["ART_MAX_HOURS"] = self._hours_within(name, task.max_cost, envs)
        server = {
            "name": given["name"] or task.name,
            "num_nodes": given["num_nodes"] or task.config.get("num_nodes") or 1,
            "resources": self._share(name),
            "run": f"{_begin_lease(envs)}cd ~/{WORKDIR}\n{task.config['run']}",
        }
        return self._exec(name, server, envs, secrets)

    def _launch(
        self, name: str, task: Task, config: Mapping[str, Any], arguments: Sequence[str]
    ) -> Mapping[str, Any]:
        """Run SkyPilot's own `sky launch` in this process and return its parsed arguments.

        It knows every argument and writes the ssh alias, and values given so are in no `ps`.
        """
        launch = launch_command()
        with tempfile.TemporaryDirectory() as directory, translated(name):
            path = Path(directory) / f"{task.path.stem}.yaml"
            path.write_text(yaml.safe_dump(dict(config), sort_keys=False))
            own = ["--yes", "--detach-run", "--cluster", name, str(path)]
            own += [part for item in task.envs.items() for part in ("--env", "=".join(item))]
            own += [part for item in task.secrets.items() for part in ("--secret", "=".join(item))]
            context = parse(launch, [*own, *arguments])
            try:
                with context:
                    launch.invoke(context)
            except SystemExit as exc:  # how SkyPilot's command ends, well or not
                if exc.code:
                    raise ProviderError(f"`sky launch` of cluster `{name}` failed") from exc
        return dict(context.params)

    def _hours_within(self, name: str, max_cost: float, envs: Mapping[str, str]) -> str:
        cost, hours = self.cost(name), float(envs.get("ART_MAX_HOURS") or 0)
        left = hours_within(max_cost, so_far=cost.so_far, per_hour=cost.per_hour, hours=hours)
        return format(left, "g")

    def _wait_for_setup(self, name: str) -> None:
        """Show the newest job, which is the setup, to its end."""
        skypilot = sky()
        with translated(name):
            code = skypilot.tail_logs(name, None, follow=True, output_stream=sys.stderr)
        if code:
            raise ProviderError(
                f"The setup of cluster `{name}` failed",
                hint=f"Its output is above; mend it and launch again, or `launcher down -c {name}`",
            )

    def _share(self, name: str) -> dict[str, Any]:
        """What the server asks of its cluster: the GPUs, and all CPUs but one."""
        skypilot = sky()
        with translated(name):
            launched = skypilot.get(skypilot.status([name]))[0]["handle"].launched_resources
        share: dict[str, Any] = {}
        if launched.accelerators:
            share["accelerators"] = dict(launched.accelerators)
        if str(launched.cloud).lower() == "slurm" and launched.cpus:
            share["cpus"] = max(1, int(float(str(launched.cpus).rstrip("+"))) - 1)
        return share

    def clusters(self) -> list[ClusterInfo]:
        skypilot = sky()
        with translated("*"):
            # A cluster that tore itself down is not known to be gone before somebody looks.
            records = skypilot.get(skypilot.status(refresh=skypilot.StatusRefreshMode.AUTO))
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
        # wants the server's GPU would wait for it for ever. A run ends with the lease, as the
        # server does: a cluster with a run on it is not torn down.
        script = (
            f"ends=$(cat ~/{_LEASE_ENDS} 2>/dev/null || echo 0)\n"
            "left=$(( ends ? ends - $(date +%s) : 0 )); [ $left -ge 0 ] || left=1\n"
            f"timeout --kill-after=30 $left bash -c {shlex.quote(command)}\n"
            f"code=$?\nmkdir -p ~/{_EXIT_CODES}\n"
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
        skypilot, label = sky(), config["name"]  # SkyPilot empties the mapping it is given
        with translated(name):
            task = skypilot.Task.from_yaml_config(
                config, env_overrides=list(envs.items()), secrets_overrides=list(secrets.items())
            )
            job_id, _ = skypilot.get(skypilot.exec(task, cluster_name=name))
        return Run(str(job_id), label, RunStatus.PENDING)

    def runs(self, name: str) -> list[Run]:
        skypilot = sky()
        with translated(name):
            records = skypilot.get(skypilot.queue(name))
        return [
            Run(
                str(record["job_id"]),
                record["job_name"],
                _STATUS.get(record["status"].value, RunStatus.FAILED),
            )
            for record in sorted(records, key=lambda record: int(record["job_id"]))
        ]

    def exit_code(self, name: str, run_id: str) -> int:
        text = Remote(name).run(f"cat ~/{_EXIT_CODES}/{int(run_id)} 2>/dev/null || echo 1")
        return int(text)

    def logs(self, name: str, run_id: str, *, follow: bool, tail: int, out: TextIO) -> None:
        skypilot = sky()
        with translated(name):
            skypilot.tail_logs(name, int(run_id), follow=follow, tail=tail, output_stream=out)

    def read(self, name: str, path: str, *, follow: bool, tail: int, out: TextIO) -> None:
        lines = f"--lines={tail or '+1'}"
        follow_on = "--follow=name --retry" if follow else ""
        Remote(name).run(f"tail {lines} {follow_on} {shlex.quote(path)}", out=out)

    def writing(
        self, name: str, path: str
    ) -> contextlib.AbstractContextManager[Callable[[str], None]]:
        self._require(name)
        return Remote(name).writing(path)

    def fetch(
        self,
        name: str,
        source: str,
        to: Path,
        patterns: Sequence[str],
        *,
        checksum: bool,
        progress: Progress,
    ) -> None:
        self._require(name)
        Remote(name).fetch(source, to, patterns, checksum=checksum, progress=progress)

    def sync(self, name: str, workdir: Path, files: Sequence[str]) -> Sent:
        self._require(name)
        gone = forgotten(sent_record(name), workdir, files)
        sent = Remote(name).send(workdir, WORKDIR, files, gone)
        remember(sent_record(name), workdir, files)
        return sent

    def tunnel(
        self, name: str, ports: Mapping[int, int]
    ) -> contextlib.AbstractContextManager[Mapping[int, int]]:
        self._require(name)
        return Remote(name).tunnel(ports)

    def cancel(self, name: str, run_id: str) -> None:
        skypilot = sky()
        with translated(name):
            skypilot.get(skypilot.cancel(name, job_ids=[int(run_id)]))

    def cost(self, name: str) -> Cost:
        skypilot = sky()
        with translated(name):
            records = [it for it in skypilot.get(skypilot.cost_report()) if it["name"] == name]
        if not records:
            raise ClusterNotFound(f"There is no cluster `{name}`, and there was none")
        record = max(records, key=lambda record: record["launched_at"] or 0)
        hours, so_far = record["duration"] / 3600, float(record["total_cost"])
        return Cost(so_far, so_far / hours if hours else 0.0, hours, self._lease_ends(name))

    def _lease_ends(self, name: str) -> float | None:
        with contextlib.suppress(LauncherError, ValueError):
            return float(Remote(name).run(f"cat ~/{_LEASE_ENDS}"))
        return None

    def checks(self) -> list[Check]:
        from launcher.sky_checks import checks

        return checks()

    def _require(self, name: str) -> None:
        """The alias is written when a cluster is up and goes with it, and asking it is quick."""
        if not Remote(name).ssh_config.is_file():
            raise ClusterNotFound(f"There is no cluster `{name}` that is up")

    def down(self, name: str) -> None:
        skypilot = sky()
        with contextlib.suppress(ClusterNotFound), translated(name):
            skypilot.get(skypilot.down(name))
        forget_alias(name)
        sent_record(name).unlink(missing_ok=True)


def _begin_lease(envs: Mapping[str, str]) -> str:
    """Note on the cluster when the lease is over, for runs beside the server and for `cost`."""
    seconds = int(float(envs.get("ART_MAX_HOURS") or 0) * 3600)
    note = f"echo $(( $(date +%s) + {seconds} )) >" if seconds else "rm -f "
    return f"mkdir -p ~/.art-cluster; {note}~/{_LEASE_ENDS}\n"
