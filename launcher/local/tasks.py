"""Check that a local cluster can run a task, and copy its file mounts into the sandbox."""

from pathlib import Path

from launcher.errors import TaskError
from launcher.files import copy_if_new
from launcher.task import Task, requests_resource


def check_task(task: Task) -> None:
    """Raise if a task needs something that a local cluster does not have."""
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
