"""The laptop side: rent a cluster, run on it, bring its checkpoints home, tear it down."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launcher.cluster import Cluster
    from launcher.provider import Run
    from launcher.task import Task

__all__ = ["Cluster", "Run", "Task"]
_HOMES = {"Cluster": "launcher.cluster", "Run": "launcher.provider", "Task": "launcher.task"}


def __getattr__(name: str) -> Any:
    """Import on first use: `launcher --help` needs none of these."""
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module `launcher` has no attribute `{name}`")
    return getattr(importlib.import_module(_HOMES[name]), name)
