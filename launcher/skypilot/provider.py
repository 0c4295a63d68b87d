"""`SkyProvider`: clusters that SkyPilot rents. Files, ports and short commands go over ssh."""

import contextlib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TextIO

from launcher.errors import ClusterNotFound, LauncherError, ProviderError, Unreachable
from launcher.files import record_sent, refuse_unignored_env_file, removed_since
from launcher.provider import RUN, WORKDIR, Check, ClusterInfo, Cost, Price, Progress, Run, Sent
from launcher.skypilot import launch as sky_launch
from launcher.skypilot import runs as sky_runs
from launcher.skypilot import scripts
from launcher.skypilot.door import ANY, forget_alias, sky, translated, write_alias
from launcher.ssh.remote import Remote
from launcher.state import home, sent_record
from launcher.task import Task

_UPLOADS_S = 1800
"""Seconds that `down` waits for uploads to a bucket."""


class SkyProvider:
    """Clusters that SkyPilot rents: on a cloud, on Kubernetes or on Slurm."""

    option: ClassVar[str] = ""

    def launch(
        self,
        name: str,
        task: Task,
        arguments: Sequence[str],
        *,
        reachable: Callable[[], None] = lambda: None,
    ) -> Run | None:
        refuse_unignored_env_file(task.config.get("workdir"))
        return sky_launch.launch(name, task, arguments, reachable=reachable, cost=self.cost)

    def like(self, name: str) -> list[str]:
        return sky_launch.like(name)

    def resume(self, name: str) -> Run | None:
        return sky_launch.resume(name)

    def clusters(self) -> list[ClusterInfo]:
        skypilot = sky()
        with translated(ANY):
            # Without a refresh SkyPilot still lists a cluster that tore itself down.
            records = skypilot.get(skypilot.status(refresh=skypilot.StatusRefreshMode.AUTO))
        return [
            ClusterInfo(
                record["name"],
                _status(record),
                f"{record['cloud']} {record['region'] or ''} {record['resources_str']}",
            )
            for record in records
        ]

    def run(
        self, name: str, command: str, envs: Mapping[str, str], secrets: Mapping[str, str]
    ) -> Run:
        # One CPU and no GPU: a job that requests the server's GPU would wait for it forever. On all
        # machines, because a job for one of them may start on any, and the server is on the first.
        config = {
            **{"name": RUN, "resources": {"cpus": 1}, "num_nodes": sky_launch.nodes(name)},
            "run": scripts.run(command),
        }
        return sky_runs.start(name, config, envs, secrets)

    def runs(self, name: str) -> list[Run]:
        return sky_runs.runs(name)

    def exit_code(self, name: str, run_id: str) -> int:
        file = f"~/{scripts.EXIT_CODES}/{int(run_id)}"
        with self._reached(name) as remote:
            return int(remote.run(f"cat {file} 2>/dev/null || echo 1"))

    def logs(self, name: str, run_id: str | None, *, follow: bool, tail: int, out: TextIO) -> None:
        sky_runs.logs(name, run_id, follow=follow, tail=tail, out=out)

    def read(self, name: str, path: str, *, follow: bool, tail: int, out: TextIO) -> None:
        lines = f"--lines={tail or '+1'}"
        follow_options = "--follow=name --retry" if follow else ""
        with self._reached(name) as remote:
            remote.run(f"tail {lines} {follow_options} {shlex.quote(path)}", out=out)

    def writer(
        self, name: str, path: str
    ) -> contextlib.AbstractContextManager[Callable[[str], None]]:
        self._require(name)
        return Remote(name).writer(path)

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
        with self._reached(name) as remote:
            remote.fetch(source, to, patterns, checksum=checksum, progress=progress)

    def sync(self, name: str, workdir: Path, files: Sequence[str]) -> Sent:
        removed = removed_since(sent_record(name), workdir, files)
        with self._reached(name) as remote:
            sent = remote.send(workdir, WORKDIR, files, removed)
        record_sent(sent_record(name), workdir, files)
        return sent

    @contextlib.contextmanager
    def tunnel(self, name: str, ports: Mapping[int, int]) -> Iterator[Mapping[int, int]]:
        with self._reached(name) as remote, remote.tunnel(ports) as local:
            yield local

    def cancel(self, name: str, run_id: str) -> None:
        skypilot = sky()
        with translated(name):
            skypilot.get(skypilot.cancel(name, job_ids=[int(run_id)]))

    def cost(self, name: str) -> Cost:
        skypilot = sky()
        with translated(name):
            records = [it for it in skypilot.get(skypilot.cost_report()) if it["name"] == name]
        if not records:
            raise ClusterNotFound(
                f"There is no cluster `{name}`, and SkyPilot has no record of one"
            )
        record = max(records, key=lambda record: record["launched_at"] or 0)
        hours, so_far = record["duration"] / 3600, float(record["total_cost"])
        return Cost(so_far, so_far / hours if hours else 0.0, hours, self._lease_ends(name))

    def _lease_ends(self, name: str) -> float | None:
        with contextlib.suppress(LauncherError, ValueError, IndexError):
            return float(Remote(name).run(f"cat ~/{scripts.LEASE_ENDS}").split()[0])
        return None

    def ports_record(self, name: str) -> Path:
        return home() / "ports" / f"{name}.json"

    def prices(self) -> Mapping[tuple[str, int], Price]:
        from launcher.skypilot.prices import prices

        return prices()

    def checks(self) -> list[Check]:
        from launcher.skypilot.checks import checks

        return checks()

    @contextlib.contextmanager
    def _reached(self, name: str) -> Iterator[Remote]:
        """Give the head of a cluster. If ssh fails, look up why in SkyPilot's list of clusters.

        A cluster that tore itself down leaves its ssh alias behind.
        """
        self._require(name)
        try:
            yield Remote(name)
        except Unreachable as error:
            found = next((it for it in self.clusters() if it.name == name), None)
            if found is None:
                forget_alias(name)
                raise ClusterNotFound(
                    f"Cluster `{name}` no longer exists: someone ended it, or its lease ran out",
                    hint=f"Launch it again with `launcher up -c {name}`",
                ) from error
            if found.status != "up":
                raise ProviderError(
                    f"Cluster `{name}` is {found.status}, not up",
                    hint=f"Bring it up with `launcher up -c {name}`, or end it with "
                    f"`launcher down -c {name}`",
                ) from error
            raise

    def _require(self, name: str) -> None:
        """Raise `ClusterNotFound` unless the cluster has an ssh alias, which is quick to check.

        SkyPilot writes the alias when a cluster is up and removes it with the cluster. It is
        missing if the launcher was killed before the cluster was up.
        """
        alias = Remote(name).ssh_config
        if not alias.is_file():
            write_alias(name)
        if not alias.is_file():
            raise ClusterNotFound(f"There is no cluster `{name}` that is up")

    def down(self, name: str) -> None:
        skypilot = sky()
        with contextlib.suppress(ClusterNotFound), translated(name):
            records = skypilot.get(skypilot.status([name]))
            # Ending the runs and looking for uploads takes seconds, and there rarely are any.
            graceful = any(_has_uploads(record) for record in records)
            skypilot.get(skypilot.down(name, graceful=graceful, graceful_timeout=_UPLOADS_S))
        forget_alias(name)
        for record in (sent_record(name), self.ports_record(name)):
            record.unlink(missing_ok=True)


def _status(record: Mapping[str, Any]) -> str:
    """SkyPilot calls a cluster INIT before it is up, and again if it finds it unhealthy."""
    status = str(record["status"].value).lower()
    return "unhealthy" if status == "init" and record["cluster_ever_up"] else status


def _has_uploads(record: Mapping[str, Any]) -> bool:
    mounts = record["last_creation_yaml"] or ""
    return bool(record["cluster_ever_up"]) and "MOUNT_CACHED" in mounts
