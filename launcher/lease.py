"""The lease: when the server of a cluster exits by itself, so that the cluster can be torn down.

It travels to the server as `ART_MAX_HOURS` and `ART_IDLE_MINUTES`; SkyPilot's autostop then ends
the cluster, since nothing runs on it any more.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from launcher.errors import LauncherError
from launcher.settings import Settings

HOURS, IDLE_MINUTES = 8.0, 30.0
"""What a cluster gets when nobody says otherwise."""
AUTOSTOP = {"idle_minutes": 5, "wait_for": "jobs", "down": True}
"""What a task gets that has no `autostop` of its own. An open ssh session does not count."""


@dataclass(frozen=True)
class Lease:
    """What the command line says about the lease; None where it says nothing."""

    max_hours: float | None = None
    idle_minutes: float | None = None
    max_cost: float | None = None
    """US dollars; hours once the price of the cluster is known."""
    off: bool = False
    """The server stays until it is ended."""

    def __post_init__(self) -> None:
        given = (self.max_hours, self.idle_minutes, self.max_cost)
        if self.off and any(value is not None for value in given):
            raise LauncherError(
                "`--no-lease` cannot stand beside a lease",
                hint="Leave out `--no-lease`, or `--max-hours`, `--max-cost` and `--idle-minutes`",
            )

    @property
    def options(self) -> list[str]:
        """What was given, as on the command line."""
        given = {"--max-hours": self.max_hours, "--idle-minutes": self.idle_minutes}
        given |= {"--max-cost": self.max_cost, "--no-lease": self.off or None}
        return [option for option, value in given.items() if value is not None]

    def envs(self, settings: Settings) -> dict[str, str]:
        """The variables that win over those of the task."""
        if self.off:
            return {"ART_MAX_HOURS": "0", "ART_IDLE_MINUTES": "0"}
        values = {
            "ART_MAX_HOURS": _first(self.max_hours, settings.max_hours),
            "ART_IDLE_MINUTES": _first(self.idle_minutes, settings.idle_minutes),
        }
        return {name: format(value, "g") for name, value in values.items() if value is not None}


DEFAULTS = {"ART_MAX_HOURS": f"{HOURS:g}", "ART_IDLE_MINUTES": f"{IDLE_MINUTES:g}"}


def hours_within(max_cost: float, *, so_far: float, per_hour: float, hours: float) -> float:
    """How long a cluster may go on for `max_cost` in all, `hours` (0 is no limit) at most."""
    if per_hour <= 0:
        raise LauncherError(
            "SkyPilot knows no price for this cluster, so `--max-cost` cannot be kept",
            hint="Give `--max-hours`, or the prices in `~/.sky/config.yaml`",
        )
    left = (max_cost - so_far) / per_hour
    if left <= 0:
        raise LauncherError(
            f"The cluster cost ${so_far:.2f} before its server started, and `--max-cost` is "
            f"${max_cost:.2f}",
            hint="Give it more, or end it with `launcher down`",
        )
    return min(left, hours) if hours else left


def told(envs: Mapping[str, str], max_cost: float | None) -> str:
    """The lease of a task in words."""
    hours, idle = float(envs["ART_MAX_HOURS"]), float(envs["ART_IDLE_MINUTES"])
    parts = [f"after {idle:g} idle minutes"] if idle else []
    parts += [f"after {hours:g} hours"] if hours else []
    parts += [f"at ${max_cost:.2f}"] if max_cost is not None else []
    if not parts:
        return "No lease: the cluster stays, and costs, until you end it with `launcher down`"
    return "Lease: the cluster ends by itself " + " or ".join(parts)


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)
