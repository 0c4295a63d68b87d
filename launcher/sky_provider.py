"""Clusters that SkyPilot rents, through `sky_door`, and reaches by ssh, through `remote`."""

import contextlib
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import yaml

from launcher import scripts
from launcher.errors import ClusterNotFound, LauncherError, ProviderError, RunNotFound
from launcher.files import forgotten, remember, select
from launcher.lease import hours_within
from launcher.provider import WORKDIR, Check, ClusterInfo, Cost, Progress, Run, RunStatus, Sent
from launcher.remote import Remote
from launcher.sky_door import (
    ANY,
    forget_alias,
    launch_command,
    parse,
    reading,
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
_NOT_FOUND = 102  # of `sky.exceptions.JobExitCode`


class SkyProvider:
    """Clusters that SkyPilot rents: on a cloud, on Kubernetes or on Slurm."""

    def launch(
        self,
        name: str,
        task: Task,
        arguments: Sequence[str],
        *,
        reachable: Callable[[], None] = lambda: None,
    ) -> Run | None:
        """Two requests: SkyPilot makes the cluster, then starts setup and server as one job.

        The job of the launch itself would hold every CPU that a Slurm cluster has for as long as
        it lasts, and nothing could run beside a server that is that job.
        """
        command = launch_command()
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / f"{task.path.stem}.yaml"
            own = ["--yes", "--detach-run", "--cluster", name, str(path)]
            own += [part for item in task.envs.items() for part in ("--env", "=".join(item))]
            own += [part for item in task.secrets.items() for part in ("--secret", "=".join(item))]
            context = parse(command, [*own, *arguments])
            given: dict[str, Any] = dict(context.params)
            nodes = given["num_nodes"] or task.config.get("num_nodes") or 1
            setup = None if self._skips_setup(name, given) else task.config.get("setup")
            # SkyPilot lets no machine start before every one is set up; one script cannot.
            apart = setup is not None and nodes > 1
            left_out = ("run",) if apart else ("run", "setup")
            config = {key: value for key, value in task.config.items() if key not in left_out}
            path.write_text(yaml.safe_dump(config, sort_keys=False))
            self._invoke(name, command, context)
        if given["dryrun"] or given["async_call"]:
            return None
        if workdir := task.config.get("workdir"):
            remember(sent_record(name), Path(workdir), select(Path(workdir)))
        reachable()
        if apart:
            self._wait_for_setup(name)
        envs = {**(given["env_file"] or {}), **dict(given["env"])}
        secrets = {**(given["secret_file"] or {}), **dict(given["secret"])}
        if task.max_cost is not None:
            envs["ART_MAX_HOURS"] = self._hours_within(name, task.max_cost, envs)
        script = scripts.server(
            task.config["run"],
            None if apart else setup,
            envs,
            hours_include_setup=task.max_cost is not None,
        )
        server = {
            "name": given["name"] or task.name,
            "num_nodes": nodes,
            "resources": self._share(name),
            "run": script,
        }
        return self._exec(name, server, envs, secrets)

    def _skips_setup(self, name: str, given: Mapping[str, Any]) -> bool:
        """As `sky launch` does; `--fast` means a cluster that is up."""
        if given["fast"]:
            return any(it.name == name and it.status == "up" for it in self.clusters())
        return bool(given["no_setup"])

    def _invoke(self, name: str, command: Any, context: Any) -> None:
        """Run SkyPilot's own `sky launch` in this process.

        It knows every argument and writes the ssh alias, and values given so are in no `ps`.
        """
        try:
            with translated(name), context:
                command.invoke(context)
        except SystemExit as exc:  # how SkyPilot's command ends, well or not
            if exc.code:
                raise ProviderError(f"`sky launch` of cluster `{name}` failed") from exc

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
        with translated(ANY):
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
        # One CPU and no GPU: a job that wants the server's would wait for it for ever.
        config = {"name": "run", "resources": {"cpus": 1}, "run": scripts.run(command)}
        return self._exec(name, config, envs, secrets)

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
        text = Remote(name).run(f"cat ~/{scripts.EXIT_CODES}/{int(run_id)} 2>/dev/null || echo 1")
        return int(text)

    def logs(self, name: str, run_id: str | None, *, follow: bool, tail: int, out: TextIO) -> None:
        skypilot, job_id = sky(), None if run_id is None else int(run_id)
        with reading(out) as reader, translated(name):
            code = skypilot.tail_logs(name, job_id, follow=follow, tail=tail, output_stream=reader)
        if code == _NOT_FOUND:
            raise RunNotFound(f"Cluster `{name}` has no run `{run_id or 1}`")

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
            return float(Remote(name).run(f"cat ~/{scripts.LEASE_ENDS}"))
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
