"""What a state directory holds: its models, their checkpoints and their history. Reads only."""

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
    """One model's directory, `.art/PROJECT/models/NAME`."""

    project: str
    name: str
    directory: Path

    def steps(self) -> list[int]:
        """Steps on disk, lowest first, whole or not: nothing is hashed here."""
        found = self.directory.glob(f"{CHECKPOINTS}/[0-9]*/{MANIFEST}")
        return sorted(int(path.parent.name) for path in found)

    def damaged(self) -> list[str]:
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
        """One object a step, as the server logged them; a line cut off by a crash is left out."""
        path = self.directory / HISTORY
        if not path.is_file():
            return []
        found = []
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found


def list_runs(state: Path) -> Iterator[ModelRun]:
    """Every run under `state`, by project and name."""
    for directory in sorted(state.glob(MODEL_GLOB)):
        if directory.is_dir():
            yield ModelRun(directory.parent.parent.name, directory.name, directory)


def find_run(state: Path, name: str | None) -> ModelRun:
    """The run called `name` (or `PROJECT/NAME`); without a name the only one, or the newest."""
    found = list(list_runs(state))
    if name is not None:
        found = [run for run in found if name in (run.name, f"{run.project}/{run.name}")]
    if not found:
        what = f"no run `{name}`" if name else "no run"
        raise NotFound(
            f"There is {what} in `{state}`",
            hint="Give the server's `--state-dir`, and see `trainer models` for what is there",
        )
    return max(found, key=lambda run: run.directory.stat().st_mtime)
