"""The tasks that come with the kit, by name."""

from pathlib import Path

from kit.package_data import root
from launcher.errors import TaskError


def tasks() -> dict[str, Path]:
    """The packaged tasks, by name: in a clone those in `sky/`."""
    return {path.stem: path for path in sorted((root() / "sky").glob("*.yaml"))}


def find_task(given: str) -> Path:
    """The file of a task: a path, or the name of a packaged task.

    `sky/art.yaml` works outside a clone too, because the manual calls the tasks by these paths.
    """
    path = Path(given)
    if path.is_file():
        return path
    for name, packaged in tasks().items():
        if given in (name, f"sky/{name}.yaml"):
            return packaged
    raise TaskError(
        f"There is no file `{given}`, and no packaged task of that name",
        hint="List the packaged tasks with `launcher tasks`",
    )


def summary(task: Path) -> str:
    """What a packaged task does: the first line of its file, a comment."""
    with task.open(encoding="utf-8") as file:
        return file.readline().removeprefix("#").strip()
