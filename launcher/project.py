"""The user's project, looked at before anything is rented: its size, dependencies and Python."""

import os
import re
import shutil
import subprocess
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kit.package_data import clone
from launcher.errors import ProjectError
from launcher.files import file_sizes, select
from launcher.shipping import with_kit
from launcher.task import Task

LARGE = 200_000_000
"""Size of a workdir, in bytes, from which on a launch and a sync warn."""
PYTHON, OLDEST_PYTHON = 12, 11
"""Minor versions of Python 3: the one on most clusters, and the oldest that the kit supports."""
_FILES = ("uv.lock", "pyproject.toml", "requirements.txt")


def prepared(task: Task, progress: Callable[[str], None]) -> Task:
    """Check the workdir of a task, and return the task with the kit beside it if it needs that."""
    sent, workdir = with_kit(task), task.config.get("workdir")
    if isinstance(workdir, dict):
        return sent  # SkyPilot clones it on the cluster
    directory = Path(workdir or ".")
    if warning := size_warning(directory, file_sizes(directory, select(directory))):
        progress(warning)
    if sent is not task:
        *_, kit = sent.config["file_mounts"].values()
        check_dependencies(directory, kit, progress)
    return sent


def size_warning(workdir: Path, sizes: Mapping[str, int]) -> str | None:
    """Say where the bytes of a large workdir are, and how to leave them out."""
    total = sum(sizes.values())
    if total <= LARGE:
        return None
    folders = Counter[str]()
    for name, size in sizes.items():
        top, _, inside = name.partition("/")
        folders[f"{top}/" if inside else top] += size
    most = [(name, size) for name, size in folders.most_common(3) if size > total / 20]
    listed = ", ".join(f"`{name}` {_gigabytes(size)}" for name, size in most)
    ignore_file = ".skyignore" if (workdir / ".skyignore").is_file() else ".gitignore"
    return (
        f"warning: `{workdir.resolve()}` goes to the cluster with {_gigabytes(total)}: {listed}. "
        f"Leave a folder out with a line such as `/{most[0][0]}` in `{ignore_file}`"
    )


def check_dependencies(directory: Path, kit: str, progress: Callable[[str], None]) -> None:
    """Raise if the project's dependencies do not resolve, and say what could not be checked."""
    if not any((directory / name).is_file() for name in _FILES):
        progress(
            f"`{directory.resolve()}` has no pyproject.toml, uv.lock or requirements.txt: "
            "its environment on the cluster has only the kit"
        )
        return
    project = _project(directory / "pyproject.toml")
    minor = _python_minor(str(project.get("requires-python") or ""))
    if minor < OLDEST_PYTHON:
        progress(
            f"The project needs Python 3.{minor} and the kit 3.{OLDEST_PYTHON} or later: "
            "on the cluster `import trainer` fails in the project's environment"
        )
    if (directory / "uv.lock").is_file():
        return  # resolved already
    sources = ["pyproject.toml"] if project else []
    sources += ["requirements.txt"] if (directory / "requirements.txt").is_file() else []
    if not sources:
        progress("pyproject.toml has no table `[project]`: its dependencies were not checked")
        return
    uv = shutil.which("uv") or shutil.which("uv", path=f"{clone() or '.'}/.uv/bin")
    if uv is None:
        progress("The project's dependencies were not checked, because `uv` is not installed here")
        return
    fault = _unresolved(uv, directory, sources, minor, kit)
    if "No solution found" in fault and "network was disabled" not in fault:
        raise ProjectError(
            f"The dependencies of `{directory.resolve()}` do not resolve for Python 3.{minor} "
            f"on Linux:\n{fault}",
            hint=f"Nothing was launched. Change {' or '.join(f'`{name}`' for name in sources)}",
        )
    if fault:
        progress(f"The project's dependencies were not checked: {fault.splitlines()[0].strip()}")


def _project(path: Path) -> dict[str, Any]:
    """The table `[project]` of a pyproject.toml; empty if there is none."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8")).get("project")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ProjectError(f"`{path}` cannot be read: {error}", hint="Correct the file") from error
    return found if isinstance(found, dict) else {}


def _python_minor(requires: str) -> int:
    """The Python that a cluster takes for a project: 3.12 if `requires-python` allows it."""
    lowest = [int(it) for it in re.findall(r"(?:>=|==|~=)\s*3\.(\d+)", requires)]
    exact = [int(it) for it in re.findall(r"(?:==|<=)\s*3\.(\d+)", requires)]
    below = [int(it) - 1 for it in re.findall(r"<\s*3\.(\d+)", requires)]
    return min([max([PYTHON, *lowest]), *exact, *below])


def _unresolved(uv: str, directory: Path, sources: list[str], minor: int, kit: str) -> str:
    """Why the requirements do not resolve: the lines that uv wrote, or an empty string."""
    links = os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS")
    command = [uv, "pip", "compile", "--quiet", f"--python-version=3.{minor}"]
    try:
        done = subprocess.run(
            [*command, "--python-platform=linux", *sources],
            cwd=directory,
            env={**os.environ, "UV_FIND_LINKS": f"{kit},{links}" if links else kit},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=90,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"`uv pip compile` does not answer: {error}"
    return "" if done.returncode == 0 else done.stderr.rstrip()[:2000] or "`uv` failed"


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
