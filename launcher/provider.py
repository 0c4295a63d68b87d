"""The port between the verbs and what they act on: SkyPilot, or a sandbox of this machine.

A provider knows clusters by name. Its methods raise `LauncherError`s only.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol, TextIO

from kit.state_dir import STATE_DIR
from launcher.errors import RunNotFound
from launcher.task import Task

WORKDIR = "sky_workdir"
CLUSTER_STATE_DIR = f"{WORKDIR}/{STATE_DIR}"
"""Where `trainer serve` keeps its checkpoints, below the home of a cluster."""
SERVER = "server"
"""In place of a run's id: the newest run of the task itself."""
RUN, SETUP = "run", "launcher-setup"
"""Names of runs that are not the task itself: a command beside it, and a setup that comes first."""
SETUP_FAILED = "The setup failed"
"""What a server's log says where its setup did not end well, and the server did not start."""


class RunStatus(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def over(self) -> bool:
        return self in (RunStatus.SUCCEEDED, RunStatus.FAILED, RunStatus.CANCELLED)


@dataclass(frozen=True)
class Run:
    """One command that was started on a cluster."""

    id: str
    name: str
    status: RunStatus


def resolve_run_id(run_id: str | None, cluster: str, runs: Sequence[Run]) -> str:
    """The id of the run that is asked for: None is the newest, `SERVER` that of the task itself."""
    if run_id is not None and run_id != SERVER:
        return run_id
    wanted = [run for run in runs if run_id is None or run.name != RUN]
    if not wanted:
        raise RunNotFound(f"Cluster `{cluster}` has no {run_id or 'run'} yet")
    return wanted[-1].id


def live_server(runs: Sequence[Run]) -> Run | None:
    """The run of the task itself if it is alive: the first of those that are."""
    alive = (run for run in runs if not run.status.over)
    return next((run for run in alive if run.name not in (RUN, SETUP)), None)


@dataclass(frozen=True)
class ClusterInfo:
    """A cluster as its provider sees it."""

    name: str
    status: str
    """`up`, `init` (half made), `unhealthy` (it was up, and may still be) or `stopped`."""
    where: str
    """The cloud or Slurm cluster with its resources, or the sandbox directory."""


@dataclass(frozen=True)
class Sent:
    """What a sync changed on a cluster."""

    files: tuple[str, ...]
    """Files that were sent, relative to the workdir."""
    removed: tuple[str, ...]
    """Files that are not here any more, and now not there either."""
    bytes: int
    """Size of the files that were sent."""


@dataclass(frozen=True)
class Cost:
    """What a cluster cost, in US dollars by its provider's prices."""

    so_far: float
    per_hour: float
    hours: float
    """How long it has been up."""
    lease_ends: float | None
    """When its lease is over, in seconds since 1970; None when it has none or nobody could tell."""

    def projected(self, now: float) -> float | None:
        """What it will have cost when the lease is over."""
        if self.lease_ends is None:
            return None
        return self.so_far + self.per_hour * max(self.lease_ends - now, 0) / 3600


@dataclass(frozen=True)
class Check:
    """One thing that `doctor` looked at."""

    name: str
    ok: bool
    told: str
    """What was found, in one sentence."""
    fix: str = ""
    """What to do about it."""


Progress = Callable[[int, float], None]
"""Told the bytes that arrived and the share of all, from 0 to 1."""


class Provider(Protocol):
    """What every place that can hold a cluster does."""

    def launch(
        self,
        name: str,
        task: Task,
        arguments: Sequence[str],
        *,
        reachable: Callable[[], None] = lambda: None,
    ) -> Run | None:
        """Make or reuse cluster `name`, sync, and start setup and run, without waiting for them.

        The task's lease goes along; one in dollars becomes hours by the price of the cluster.
        `reachable` is called as soon as a tunnel can be opened.

        `arguments` are further ones in the provider's own words (those of `sky launch`). Returns
        None when they asked for a rehearsal that starts nothing.
        """

    def resume(self, name: str) -> Run | None:
        """Wait for a launch that goes on without whoever asked for it; the server it started."""

    def clusters(self) -> list[ClusterInfo]:
        """All clusters of this provider."""

    def run(
        self, name: str, command: str, envs: Mapping[str, str], secrets: Mapping[str, str]
    ) -> Run:
        """Start `command` in the workdir beside what runs already."""

    def sync(self, name: str, workdir: Path, files: Sequence[str]) -> Sent:
        """Bring the cluster's copy of `workdir`, of which `files` go, up to date.

        Sends what changed and deletes what was sent before and is not here any more; what the
        cluster made itself stays.
        """

    def cancel(self, name: str, run_id: str) -> None:
        """End a run that is not over."""

    def runs(self, name: str) -> list[Run]:
        """Every run of the cluster, oldest first; the first is the task's own."""

    def exit_code(self, name: str, run_id: str) -> int:
        """Exit code of a run that is over."""

    def logs(self, name: str, run_id: str | None, *, follow: bool, tail: int, out: TextIO) -> None:
        """Write the output of a run, of the newest for None, of the server for `SERVER`.

        `tail` of 0 is all of it.
        """

    def read(self, name: str, path: str, *, follow: bool, tail: int, out: TextIO) -> None:
        """Write a text file below the cluster's home to `out`, as `logs` does."""

    def writer(self, name: str, path: str) -> AbstractContextManager[Callable[[str], None]]:
        """Gives a function that makes a text the content of a file below the cluster's home.

        The connection opens at once, beside whatever else is done, and a text that is never
        given changes nothing.
        """

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
        """Copy files below `source` of the cluster's home to `to`, what is new only.

        A pattern is a path below `source` with `*` in its parts; `/**` at its end is all of a
        directory. With `checksum` a file is new when its content differs, not only its size or
        time. A second call goes on where an interrupted one ended.
        """

    def tunnel(
        self, name: str, ports: Mapping[int, int]
    ) -> AbstractContextManager[Mapping[int, int]]:
        """Reach ports of the cluster's loopback (keys) at local ones (values; 0 for any).

        Gives the local port of each.
        """

    def down(self, name: str) -> None:
        """End the cluster and all that runs on it; safe to repeat."""

    def cost(self, name: str) -> Cost:
        """What the cluster cost so far."""

    def ports_record(self, name: str) -> Path:
        """The file of this machine where the ports of a cluster are noted; gone with it."""

    def checks(self) -> list[Check]:
        """What this provider needs to work, and whether it is there."""
