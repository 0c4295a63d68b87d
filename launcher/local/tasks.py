"""What a task asks of this machine: refused by name, or copied into the sandbox."""

import json
from pathlib import Path

from launcher.errors import TaskError
from launcher.files import copy_if_new
from launcher.task import Task


def refuse(task: Task) -> None:
    """Name what a task asks for and this machine cannot give."""
    config = task.config
    wanted = [f"`{key}`" for key in ("volumes", "config") if config.get(key)]
    if isinstance(config.get("workdir"), dict):
        wanted.append("a `workdir` from git")
    if (config.get("num_nodes") or 1) != 1:
        wanted.append(f"{config['num_nodes']} nodes")
    if "accelerators" in json.dumps(config.get("resources") or {}):
        wanted.append("GPUs")
    mounts = (config.get("file_mounts") or {}).items()
    wanted += [f"the bucket at `{target}`" for target, source in mounts if isinstance(source, dict)]
    if wanted:
        raise TaskError(
            f"`{task.path}` asks for {wanted[0]}, and a local cluster has none",
            hint="Use `sky/art-cpu.yaml`, unset `ART_BUCKET`, or leave `--local` out",
        )


def mount(source: Path, home: Path, target: str) -> None:
    if not source.exists():
        raise TaskError(f"There is no `{source}` to mount at `{target}`")
    path = (home / target.removeprefix("~/")).resolve()
    if not path.is_relative_to(home.resolve()):
        raise TaskError(
            f"`{target}` is outside the sandbox of a local cluster", hint="Mount it below `~/`"
        )
    for file in source.rglob("*") if source.is_dir() else [source]:
        copy_if_new(file, path / file.relative_to(source) if source.is_dir() else path)
