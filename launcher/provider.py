"""The port between the verbs and what they act on: SkyPilot, or a sandbox of this machine.

A provider knows clusters by name. Its methods raise `LauncherError`s only.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol, TextIO

from launcher.task import Task

WORKDIR = "sky_workdir"
STATE_DIR = f"{WORKDIR}/.art"
"""Where `trainer serve` keeps its checkpoints, below the home of a cluster."""


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


@dataclass(frozen=True)
class ClusterInfo:
    """A cluster as its provider sees it."""

    name: str
    status: str
    """`up`, `init` (half-made) or `stopped`."""
    where: str
    """The cloud or Slurm cluster with its resources, or the sandbox directory."""


class Provider(Protocol):
    """What every place that can hold a cluster does."""

    def launch(self, name: str, task: Task, arguments: Sequence[str]) -> Run | None:
        """Make or reuse cluster `name`, sync, and start setup and run, without waiting for them.

        `arguments` are further ones in the provider's own words (those of `sky launch`). Returns
        None when they asked for a rehearsal that starts nothing.
        """

    def clusters(self) -> list[ClusterInfo]:
        """All clusters of this provider."""

    def run(
        self, name: str, command: str, envs: Mapping[str, str], secrets: Mapping[str, str]
    ) -> Run:
        """Start `command` in the workdir beside what runs already."""

    def runs(self, name: str) -> list[Run]:
        """Every run of the cluster, oldest first; the first is the task's own."""

    def exit_code(self, name: str, run_id: str) -> int:
        """Exit code of a run that is over."""

    def logs(self, name: str, run_id: str, *, follow: bool, tail: int, out: TextIO) -> None:
        """Write the output of a run; `tail` of 0 is all of it."""

    def fetch(self, name: str, source: str, to: Path, *, checksum: bool) -> None:
        """Copy the checkpoints below `source` of the cluster's home to `to`, what is new only.

        With `checksum` a file is new when its content differs, not only its size or time.
        """

    def tunnel(
        self, name: str, ports: Mapping[int, int]
    ) -> AbstractContextManager[Mapping[int, int]]:
        """Reach ports of the cluster's loopback (keys) at local ones (values; 0 for any).

        Gives the local port of each.
        """

    def down(self, name: str) -> None:
        """End the cluster and all that runs on it; safe to repeat."""
