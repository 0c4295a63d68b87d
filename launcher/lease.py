"""The lease: when a cluster's server exits by itself, so that the cluster can be torn down.

The server receives it as `ART_MAX_HOURS` and `ART_IDLE_MINUTES`. Once the server has exited,
nothing runs on the cluster and SkyPilot's autostop ends it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from launcher.errors import LauncherError
from launcher.settings import Settings

HOURS, IDLE_MINUTES = 8.0, 30.0
"""The default lease of a cluster."""
AUTOSTOP = {"idle_minutes": 5, "wait_for": "jobs", "down": True}
"""Added to a task that sets no `autostop`. An open ssh session does not keep the cluster up."""


@dataclass(frozen=True)
class Lease:
    """The lease options of the command line; None for an option that was not given."""

    max_hours: float | None = None
    idle_minutes: float | None = None
    max_cost: float | None = None
    """US dollars; converted to hours once the price of the cluster is known."""
    off: bool = False
    """The server runs until someone stops it."""

    def __post_init__(self) -> None:
        given = (self.max_hours, self.idle_minutes, self.max_cost)
        if self.off and any(value is not None for value in given):
            raise LauncherError(
                "`--no-lease` cannot be combined with a lease",
                hint="Remove `--no-lease`, or `--max-hours`, `--max-cost` and `--idle-minutes`",
            )

    @property
    def options(self) -> list[str]:
        """The names of the options that were given."""
        given = {"--max-hours": self.max_hours, "--idle-minutes": self.idle_minutes}
        given |= {"--max-cost": self.max_cost, "--no-lease": self.off or None}
        return [option for option, value in given.items() if value is not None]

    def envs(self, settings: Settings) -> dict[str, str]:
        """The variables that override those of the task."""
        if self.off:
            return {"ART_MAX_HOURS": "0", "ART_IDLE_MINUTES": "0"}
        values = {
            "ART_MAX_HOURS": _first_given(self.max_hours, settings.max_hours),
            "ART_IDLE_MINUTES": _first_given(self.idle_minutes, settings.idle_minutes),
        }
        return {name: format(value, "g") for name, value in values.items() if value is not None}


DEFAULTS = {"ART_MAX_HOURS": f"{HOURS:g}", "ART_IDLE_MINUTES": f"{IDLE_MINUTES:g}"}


def hours_within(max_cost: float, *, so_far: float, per_hour: float, hours: float) -> float:
    """Hours that a cluster may still run for `max_cost` in total, at most `hours` (0: no limit)."""
    if per_hour <= 0:
        raise LauncherError(
            "SkyPilot has no price for this cluster, so `--max-cost` cannot be enforced",
            hint="Use `--max-hours`, or set the prices in `~/.sky/config.yaml`",
        )
    left = (max_cost - so_far) / per_hour
    if left <= 0:
        raise LauncherError(
            f"The cluster cost ${so_far:.2f} before its server started, and `--max-cost` is "
            f"${max_cost:.2f}",
            hint="Raise `--max-cost`, or end the cluster with `launcher down`",
        )
    return min(left, hours) if hours else left


def describe_lease(envs: Mapping[str, str], max_cost: float | None) -> str:
    """Describe the lease of a task in one sentence."""
    hours, idle = float(envs["ART_MAX_HOURS"]), float(envs["ART_IDLE_MINUTES"])
    parts = [f"after {idle:g} idle minutes"] if idle else []
    parts += [f"after {hours:g} hours"] if hours else []
    parts += [f"at ${max_cost:.2f}"] if max_cost is not None else []
    if not parts:
        return "No lease: the cluster runs, and costs money, until you end it with `launcher down`"
    return "Lease: the cluster ends by itself " + " or ".join(parts)


def _first_given(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)
