"""`Provider`: the interface to a place that holds clusters, SkyPilot or a sandbox on this machine.

A provider identifies clusters by name. Its methods raise no errors but `LauncherError`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import ClassVar, Protocol, TextIO

from kit.state_dir import STATE_DIR
from launcher.errors import RunNotFound
from launcher.task import Task

WORKDIR = "sky_workdir"
CLUSTER_STATE_DIR = f"{WORKDIR}/{STATE_DIR}"
"""State directory of `trainer serve`, relative to the home directory of a cluster."""
ACTIVATE = (
    "if [ -f ~/.art-cluster/kit/scripts/activate ]; then . ~/.art-cluster/kit/scripts/activate; "
    f"elif [ -f ~/{WORKDIR}/.venv/bin/activate ]; then . ~/{WORKDIR}/.venv/bin/activate; fi"
)
"""A line of bash for whoever works on a cluster: the project's environment, or that of a clone."""
_UPDATE = "~/.art-cluster/kit/scripts/project-environment"
PROLOGUE = f"cd ~/{WORKDIR}\n[ ! -x {_UPDATE} ] || {_UPDATE} || exit\n{ACTIVATE}\n"
"""Starts every run: in the synced workdir, with the environment that its dependencies now need."""
SERVER = "server"
"""Given as a run's id, means the newest run of the task itself."""
RUN, SETUP = "run", "launcher-setup"
"""Names of runs other than the task: a command started with `launcher run`, and a setup."""
SETUP_FAILED = "The setup failed"
"""Text in the server's log if its setup failed, so that the server did not start."""


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
    """A command that was started on a cluster."""

    id: str
    name: str
    status: RunStatus


def resolve_run_id(run_id: str | None, cluster: str, runs: Sequence[Run]) -> str:
    """Turn None into the id of the newest run, and `SERVER` into that of the task's newest run."""
    if run_id is not None and run_id != SERVER:
        return run_id
    candidates = [run for run in runs if run_id is None or run.name != RUN]
    if not candidates:
        raise RunNotFound(f"Cluster `{cluster}` has no {run_id or 'run'} yet")
    return candidates[-1].id


def live_server(runs: Sequence[Run]) -> Run | None:
    """The first run of the task itself that is not over."""
    alive = (run for run in runs if not run.status.over)
    return next((run for run in alive if run.name not in (RUN, SETUP)), None)


@dataclass(frozen=True)
class ClusterInfo:
    """A cluster as its provider sees it."""

    name: str
    status: str
    """`up`, `init` (not fully created), `unhealthy` (was up, and may still be) or `stopped`."""
    where: str
    """The cloud or Slurm cluster and its resources, or the sandbox directory."""


@dataclass(frozen=True)
class Sent:
    """The result of a sync."""

    files: tuple[str, ...]
    """Files that were sent, relative to the workdir."""
    removed: tuple[str, ...]
    """Files that were deleted on the cluster because they no longer exist here."""
    bytes: int
    """Total size of the sent files."""


@dataclass(frozen=True)
class Cost:
    """The cost of a cluster in US dollars, by its provider's prices."""

    so_far: float
    per_hour: float
    hours: float
    """How long the cluster has been up."""
    lease_ends: float | None
    """End of the lease in seconds since 1970; None if there is no lease or it is unknown."""

    def projected(self, now: float) -> float | None:
        """The total cost at the end of the lease."""
        if self.lease_ends is None:
            return None
        return self.so_far + self.per_hour * max(self.lease_ends - now, 0) / 3600

    @classmethod
    def total(cls, costs: Iterable["Cost"]) -> "Cost":
        """The cost of clusters that end with the first of them."""
        first, *_ = every = list(costs)
        so_far, per_hour = sum(it.so_far for it in every), sum(it.per_hour for it in every)
        return cls(so_far, per_hour, first.hours, first.lease_ends)


@dataclass(frozen=True)
class Price:
    """The lowest price of some cards, in US dollars."""

    per_hour: float
    cloud: str


@dataclass(frozen=True)
class Check:
    """The result of one check of `launcher doctor`."""

    name: str
    ok: bool
    message: str
    """The finding, in one sentence."""
    fix: str = ""
    """How to fix it."""


Progress = Callable[[int, float], None]
"""Called with the bytes received so far and their share of the total, from 0 to 1."""


class Provider(Protocol):
    """The operations on clusters that every provider offers."""

    option: ClassVar[str]
    """The option that selects this provider on the command line, with a leading space."""

    def launch(
        self,
        name: str,
        task: Task,
        arguments: Sequence[str],
        *,
        reachable: Callable[[], None] = lambda: None,
    ) -> Run | None:
        """Create or reuse cluster `name`, sync, and start setup and run without waiting for them.

        A lease in dollars is converted to hours by the price of the cluster. `reachable` is
        called as soon as a tunnel can be opened. `arguments` are extra arguments for the
        provider (those of `sky launch`). Returns None if they request a dry run.
        """

    def like(self, name: str) -> list[str]:
        """Arguments for `launch` that request one machine like those of `name`, in that place."""

    def resume(self, name: str) -> Run | None:
        """Wait for a launch whose launcher has exited, and return the server that it started."""

    def clusters(self) -> list[ClusterInfo]:
        """All clusters of this provider."""

    def run(
        self, name: str, command: str, envs: Mapping[str, str], secrets: Mapping[str, str]
    ) -> Run:
        """Start `command` in the workdir, in parallel with the other runs."""

    def sync(self, name: str, workdir: Path, files: Sequence[str]) -> Sent:
        """Update the cluster's copy of `files` in `workdir`.

        Sends changed files, and deletes files that were sent before and no longer exist here.
        Files that the cluster created are kept.
        """

    def cancel(self, name: str, run_id: str) -> None:
        """Stop a run that is not over."""

    def runs(self, name: str) -> list[Run]:
        """Every run of the cluster, oldest first; the first is the task itself."""

    def exit_code(self, name: str, run_id: str) -> int:
        """Exit code of a run that is over."""

    def logs(self, name: str, run_id: str | None, *, follow: bool, tail: int, out: TextIO) -> None:
        """Write the last `tail` lines of a run's output to `out`; 0 means all of it.

        None means the newest run, `SERVER` the server. With `follow`, go on until the run is over.
        """

    def read(self, name: str, path: str, *, follow: bool, tail: int, out: TextIO) -> None:
        """Write a text file below the cluster's home directory to `out`, as `logs` does."""

    def writer(self, name: str, path: str) -> AbstractContextManager[Callable[[str], None]]:
        """Yield a function that overwrites a file below the cluster's home directory.

        The connection opens in the background. The file stays as it is until the function is
        called. A long transfer calls it again and again, as a sign that it goes on.
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
        """Copy new files below `source` in the cluster's home directory to `to`.

        A pattern is a path below `source` whose parts may contain `*`; a final `/**` matches a
        whole directory. A file is new if its size or time differs, or with `checksum` if its
        content does. A call continues where an interrupted one stopped.
        """

    def tunnel(
        self, name: str, ports: Mapping[int, int]
    ) -> AbstractContextManager[Mapping[int, int]]:
        """Forward local ports (values; 0 for any) to loopback ports of the cluster (keys).

        Yields the local port for each port of the cluster.
        """

    def down(self, name: str) -> None:
        """Tear the cluster down, with everything that runs on it. Safe to repeat."""

    def cost(self, name: str) -> Cost:
        """The cost of the cluster so far."""

    def ports_record(self, name: str) -> Path:
        """The file on this machine that records a cluster's ports; `down` deletes it."""

    def prices(self) -> Mapping[tuple[str, int], Price]:
        """What an hour of each card costs, by the name and number of cards."""

    def checks(self) -> list[Check]:
        """Check that everything this provider needs is present."""
