"""The program on the laptop: rent a cluster, train on it, pull its checkpoints, tear it down."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launcher.cluster import Cluster
    from launcher.local.provider import LocalProvider
    from launcher.provider import Run
    from launcher.task import Task

__all__ = ["Cluster", "LocalProvider", "Run", "Task"]
_MODULES = {
    "Cluster": "launcher.cluster",
    "LocalProvider": "launcher.local.provider",
    "Run": "launcher.provider",
    "Task": "launcher.task",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `launcher --help` needs none of these."""
    import importlib

    if name not in _MODULES:
        raise AttributeError(f"module `launcher` has no attribute `{name}`")
    return getattr(importlib.import_module(_MODULES[name]), name)
