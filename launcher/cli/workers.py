"""The options of `launcher up` for machines that join a server with engines only."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kit.cli import note
from launcher.cli.target import Target

if TYPE_CHECKING:
    from launcher.task import Task


@dataclass(frozen=True)
class WorkerOptions:
    """The options as they were given; `count` is None without `--workers`."""

    count: int | None
    spot: bool
    gpus: str | None

    @property
    def default_task(self) -> str | None:
        """The task of a server that workers can join, if there shall be workers."""
        from launcher.workers import HEAD_TASK

        return None if self.count is None else HEAD_TASK

    def check(self, target: Target, task: Path, max_cost: float | None) -> None:
        """Refuse options that would have no effect."""
        if task.stem == "art-worker":
            raise click.UsageError("`art-worker` joins a server: use `launcher up --workers N`")
        if self.count is None:
            if self.spot or self.gpus:
                flag = "--spot" if self.spot else "--worker-gpus"
                raise click.UsageError(f"`{flag}` is for workers: add `--workers N`")
            return
        if target.local:
            raise click.UsageError("`--workers` rents machines: remove `--workers` or `--local`")
        if max_cost is not None:
            raise click.UsageError(
                "`--max-cost` does not count workers, which come and go: use `--max-hours`"
            )

    def on_one_machine(self, task: "Task") -> "Task":
        """The same task with one machine: the others are workers."""
        return dataclasses.replace(task, config={**task.config, "num_nodes": 1})

    def apply(self, target: Target) -> None:
        if self.count is None:
            return
        target.cluster.scale(self.count, spot=self.spot, gpus=self.gpus, progress=note)
        again = f"change that with `launcher up --workers N{target.options}`"
        count = "no workers" if self.count == 0 else f"workers: {self.count}"
        note(f"Cluster `{target.cluster.name}` has {count}; {again}")


def with_workers(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options for workers, and pass the command its WorkerOptions."""

    @click.option(
        "--workers",
        type=click.IntRange(0),
        metavar="N",
        help="Have N more machines that only sample; repeat to change N.",
    )
    @click.option("--spot", is_flag=True, help="Rent new workers as spot machines.")
    @click.option("--worker-gpus", metavar="GPUS", help="GPUs of new workers.  [the server's]")
    @wraps(command)
    def with_options(
        *args: Any, workers: int | None, spot: bool, worker_gpus: str | None, **rest: Any
    ) -> None:
        command(*args, workers=WorkerOptions(workers, spot, worker_gpus), **rest)

    return with_options
