"""The options that every verb has, and the cluster that they lead to."""

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
    """The cluster that a command works on, and how the user named it."""

    cluster: "Cluster"
    local: bool
    named: bool
    env_file: Path | None

    @property
    def options(self) -> str:
        """What leads another command to the same cluster."""
        other = self.cluster.name != "art"
        return " --local" * self.local + f" -c {self.cluster.name}" * other

    def managed(self) -> ModuleType:
        """What knows of managed runs, which belong to no cluster of ours."""
        from launcher.skypilot import managed

        if self.local or self.named:
            raise click.UsageError(
                "`--managed` is on a cluster of SkyPilot's own: leave out `-c` and `--local`"
            )
        return managed


def on_cluster(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command its Target, and the options that every verb has."""

    @click.option("-c", "--cluster", "name", metavar="NAME", help="Cluster.  [art]")
    @click.option("--local", is_flag=True, help="A cluster of this machine, without SkyPilot.")
    @click.option("--env-file", type=Path, metavar="FILE", help="Settings from it.  [.env]")
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
