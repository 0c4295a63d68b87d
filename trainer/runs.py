"""Read a state directory: its models, their checkpoints and their history. Writes nothing."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kit.files import Lines, read_lines
from kit.manifest import MANIFEST, damage, read_manifest
from kit.state_dir import CHECKPOINTS, HISTORY, MODEL_GLOB, checkpoint_path
from kit.types import Json
from trainer.errors import NotFound


@dataclass(frozen=True)
class ModelRun:
    """One trained model, with its directory `.art/PROJECT/models/NAME`."""

    project: str
    name: str
    directory: Path

    def steps(self) -> list[int]:
        """Return the steps on disk, lowest first, without checking their files."""
        manifests = self.directory.glob(f"{CHECKPOINTS}/[0-9]*/{MANIFEST}")
        return sorted(int(path.parent.name) for path in manifests)

    def damaged(self) -> list[str]:
        """Check the files of every checkpoint, and describe each fault."""
        return [
            fault
            for step in self.steps()
            for fault in damage(checkpoint_path(self.directory, step))
        ]

    def base_model(self) -> str | None:
        steps = self.steps()
        path = checkpoint_path(self.directory, steps[-1]) if steps else self.directory
        return (read_manifest(path) or {}).get("base_model")

    def history(self) -> list[Json]:
        """Return the rows that the server logged, without lines that are damaged."""
        return self._history().rows

    def _history(self) -> Lines:
        return read_lines(self.directory / HISTORY)

    def summary(self) -> Json:
        """Names, newest step and newest training reward, as `trainer models` prints them."""
        steps, history = self.steps(), self._history()
        rewards = [
            row["train/reward"]
            for row in history.rows
            if isinstance(row.get("train/reward"), int | float)
        ]
        return {
            "project": self.project,
            "name": self.name,
            "base_model": self.base_model(),
            "step": steps[-1] if steps else 0,
            "checkpoints": len(steps),
            "reward": rewards[-1] if rewards else None,
            **({"damaged_lines": len(history.skipped)} if history.skipped else {}),
        }


def list_runs(state: Path) -> Iterator[ModelRun]:
    """Yield every run under `state`, sorted by project and name."""
    for directory in sorted(state.glob(MODEL_GLOB)):
        if directory.is_dir():
            yield ModelRun(directory.parent.parent.name, directory.name, directory)


def find_run(state: Path, name: str | None) -> ModelRun:
    """Return the newest run called `name` (or `PROJECT/NAME`), or the newest of all."""
    found = list(list_runs(state))
    if name is not None:
        found = [run for run in found if name in (run.name, f"{run.project}/{run.name}")]
    if not found:
        what = f"no run `{name}`" if name else "no run"
        raise NotFound(
            f"There is {what} in `{state}`",
            hint="Pass the server's `--state-dir`, and list its runs with `trainer models`",
        )
    return max(found, key=lambda run: run.directory.stat().st_mtime)


def find_checkpoint(state: Path, name: str) -> Path:
    """Return the directory of a checkpoint: a path, or the `NAME` or `NAME@STEP` of a run.

    Without a step it is the newest one.
    """
    if Path(name).is_dir():
        return Path(name)
    run_name, _, step = name.partition("@")
    try:
        run = find_run(state, run_name)
    except NotFound as error:
        raise NotFound(f"There is no checkpoint `{name}`", hint=error.hint) from error
    steps = run.steps()
    wanted = int(step) if step.isdecimal() else steps[-1] if steps and not step else None
    if wanted not in steps:
        on_disk = ", ".join(map(str, steps)) or "none"
        raise NotFound(
            f"The run `{run.project}/{run.name}` has no checkpoint `{step or 'yet'}`",
            hint=f"Its steps on disk are {on_disk}",
        )
    return checkpoint_path(run.directory, wanted)
