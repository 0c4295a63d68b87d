"""Read a state directory: its models, their checkpoints and their history. Writes nothing."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
        """Return the rows that the server logged, without lines that a crash cut off."""
        path = self.directory / HISTORY
        if not path.is_file():
            return []
        rows = []
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
        return rows

    def summary(self) -> Json:
        """Names, newest step and newest training reward, as `trainer models` prints them."""
        steps = self.steps()
        rewards = [row["train/reward"] for row in self.history() if "train/reward" in row]
        return {
            "project": self.project,
            "name": self.name,
            "base_model": self.base_model(),
            "step": steps[-1] if steps else 0,
            "checkpoints": len(steps),
            "reward": rewards[-1] if rewards else None,
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
