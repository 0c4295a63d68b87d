"""The options that every command has, and the cluster that they select."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from launcher.cluster import Cluster
    from launcher.provider import Provider


@dataclass(frozen=True)
class Target:
    """The cluster that a command works on, and how the user selected it."""

    cluster: "Cluster"
    local: bool
    named: bool
    env_file: Path | None

    @property
    def options(self) -> str:
        """The options that select the same cluster in another command, with a leading space."""
        options = " --local" if self.local else ""
        if self.cluster.name != "art":
            options += f" -c {self.cluster.name}"
        return options

    def managed(self) -> ModuleType:
        """The module for managed runs, which belong to no cluster of the user."""
        from launcher.skypilot import managed

        if self.local or self.named:
            raise click.UsageError(
                "`--managed` uses a cluster that SkyPilot chooses: remove `-c` and `--local`"
            )
        return managed


def on_cluster(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that every command has, and pass the command its Target."""

    @click.option("-c", "--cluster", "name", metavar="NAME", help="Name of the cluster.  [art]")
    @click.option("--local", is_flag=True, help="Use this machine instead of SkyPilot.")
    @click.option("--env-file", type=Path, metavar="FILE", help="File with settings.  [.env]")
    @click.pass_obj
    @wraps(command)
    def with_target(
        provider: "Provider | None",
        /,
        name: str | None,
        local: bool,
        env_file: Path | None,
        **rest: Any,
    ) -> None:
        from launcher.cluster import Cluster
        from launcher.local.provider import LocalProvider
        from launcher.settings import read

        settings = read(cluster=name, env_file=env_file)
        if provider is None and local:
            provider = LocalProvider()
        cluster = Cluster(settings.cluster, provider=provider, settings=settings)
        command(Target(cluster, local, name is not None, env_file), **rest)

    return with_target
