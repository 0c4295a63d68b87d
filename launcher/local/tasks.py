"""Check that a local cluster can run a task, and copy its file mounts into the sandbox."""

import contextlib
import socket
from pathlib import Path

from launcher.errors import LauncherError, ProviderError, TaskError
from launcher.files import copy_if_new
from launcher.task import Task, requests_resource


def check_task(task: Task) -> None:
    """Raise if a task needs something that a local cluster does not have."""
    if task.max_cost is not None:
        raise LauncherError(
            "A local cluster does not support `--max-cost`, because it costs nothing",
            hint="Use `--max-hours`, or remove `--local`",
        )
    config = task.config
    unsupported = [f"`{key}`" for key in ("volumes", "config") if config.get(key)]
    if isinstance(config.get("workdir"), dict):
        unsupported.append("a `workdir` from git")
    if (config.get("num_nodes") or 1) != 1:
        unsupported.append(f"{config['num_nodes']} nodes")
    if requests_resource(config, "accelerators"):
        unsupported.append("GPUs")
    for target, source in (config.get("file_mounts") or {}).items():
        if isinstance(source, dict):
            unsupported.append(f"the bucket at `{target}`")
    if unsupported:
        raise TaskError(
            f"`{task.path}` needs {unsupported[0]}, which a local cluster does not support",
            hint="Use the task `art-cpu`, unset `ART_BUCKET`, or remove `--local`",
        )


def check_ports(task: Task) -> None:
    """Raise if another program listens on the server's ports, and would pass for the server."""
    for port in task.ports:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            raise ProviderError(
                f"Another program listens on port {port}, where the server would",
                hint="End it (a server, or `launcher tunnel`), or set `ART_PORT` and "
                "`ART_OPENAI_PORT`",
            )


def mount(source: Path, home: Path, target: str) -> None:
    """Copy `source`, a file or directory, to `target` in the sandbox `home`."""
    if not source.exists():
        raise TaskError(f"There is no `{source}` to mount at `{target}`")
    path = (home / target.removeprefix("~/")).resolve()
    if not path.is_relative_to(home.resolve()):
        raise TaskError(
            f"`{target}` is outside the sandbox of a local cluster",
            hint="Choose a target below `~/`",
        )
    for file in source.rglob("*") if source.is_dir() else [source]:
        copy_if_new(file, path / file.relative_to(source) if source.is_dir() else path)
