"""What a launch asks for, so that its own job leaves room for runs beside the server.

Off Slurm a job holds half a CPU. On Slurm it holds what its task asks for, which is all that the
cluster has, unless the task names an instance type: that one is then the size of the cluster.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_OTHER_SIZES = ("accelerators", "instance_type", "ordered", "any_of")
_ARGUMENTS = ("cpus", "memory", "gpus", "instance_type")


def with_room(
    resources: Mapping[str, Any], given: Mapping[str, Any], clouds: Callable[[], Iterable[str]]
) -> dict[str, Any] | None:
    """`resources` of a task whose job leaves room, or None where only the launch can tell.

    `given` are the arguments of `sky launch`, and `clouds` tells those that may be used.
    """
    places = _named(resources, given) or {cloud.lower() for cloud in clouds()}
    if places and "slurm" not in places:
        return dict(resources)
    cpus, memory = _whole(resources.get("cpus")), _whole(resources.get("memory"))
    sized = any(key in resources for key in _OTHER_SIZES) or any(given[it] for it in _ARGUMENTS)
    if places != {"slurm"} or sized or cpus < 2 or not memory:
        return None
    place = {} if {"infra", "cloud"} & set(resources) else {"infra": "slurm"}
    size = {"instance_type": f"{cpus}CPU--{memory}GB", "cpus": f"{cpus - 1}+"}
    return {**resources, **place, **size}


def _named(resources: Mapping[str, Any], given: Mapping[str, Any]) -> set[str]:
    """The clouds that a launch may choose from, or none where it is not said."""
    others = resources.get("ordered") or resources.get("any_of") or [{}]
    asked = [given, *({**resources, **other} for other in others)]
    names = [str(it.get("infra") or it.get("cloud") or "*").split("/")[0].lower() for it in asked]
    names = names[:1] if names[0] != "*" else names[1:]
    return set() if "*" in names else set(names)


def _whole(amount: Any) -> int:
    """`4` of `4`, `"4"` and `"4+"`; 0 of anything else."""
    found = re.fullmatch(r"(\d+)\+?", str(amount))
    return int(found[1]) if found else 0
