"""Reads a directory of runs for the page: where runs are, their history, their kept steps.

Everything is read again only if it changed: a history of 1,000 steps is parsed once, and after
that only the lines which are appended to it.
"""

import contextlib
import math
import os
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from kit.files import identity
from kit.manifest import read_manifest
from kit.state_dir import (
    BATCHES,
    CHECKPOINTS,
    EVALS,
    GROUPS,
    HISTORY,
    MODEL_GLOB,
    MODELS,
    STEP_NAME,
    TRAJECTORIES,
    checkpoint_path,
)
from kit.types import Json
from trainer.errors import NotFound
from trainer.page import batches
from trainer.page.lines import Lines

T = TypeVar("T")
TRAINED = "num_gradient_steps"
"""A metric that only the line of a trained step has."""
_PARTS = (HISTORY, BATCHES, CHECKPOINTS, TRAJECTORIES, EVALS)


class History:
    """The metrics of a run by step, from its `history.jsonl`."""

    def __init__(self, directory: Path) -> None:
        self.lines = Lines(directory / HISTORY, add=self._add, reset=self._reset)
        self._reset()

    def _reset(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}
        self.recorded: dict[int, float] = {}
        """When each step was trained, in seconds since 1970."""
        self.not_finite = 0
        self._counts: dict[tuple[int, str], int] = {}

    def _add(self, line: Json) -> None:
        step = line["step"] if isinstance(line.get("step"), int) else None
        if step is None or isinstance(step, bool) or step < 0:
            raise ValueError("a line without a step")
        means = self.steps.setdefault(step, {})
        if TRAINED in line and TRAINED in means:
            # The step was trained again after its checkpoint was deleted: the first time is void.
            # A new dict, because other threads may be reading this one.
            means = {name: mean for name, mean in means.items() if name not in line}
            for name in line:
                self._counts.pop((step, name), None)
        when = line.get("recorded_at")
        if TRAINED in line and (recorded := finite(when)) is not None:
            self.recorded[step] = recorded
        for name, value in line.items():
            if name in ("step", "recorded_at"):
                continue
            if not is_finite(value):
                self.not_finite += isinstance(value, float)
            elif name in means:  # a client may log a split several times at one step
                count = self._counts.get((step, name), 1) + 1
                self._counts[step, name] = count
                means[name] += (value - means[name]) / count
            else:
                means[name] = value
        self.steps[step] = means

    def columns(self) -> list[str]:
        return sorted({name for means in list(self.steps.values()) for name in means})

    def trained(self) -> list[int]:
        """The steps that were trained, lowest first."""
        return sorted(step for step, means in list(self.steps.items()) if TRAINED in means)


class GroupMeans:
    """The mean of each group by step and split, from the run's `batches/groups.jsonl`."""

    def __init__(self, directory: Path) -> None:
        self.lines = Lines(directory / BATCHES / GROUPS, add=self._add, reset=self._reset)
        self._reset()

    def _reset(self) -> None:
        self.steps: dict[str, dict[int, list[Json]]] = {}

    def _add(self, line: Json) -> None:
        step, split = line.get("step", None), str(line.get("split"))
        if not isinstance(step, int) or not isinstance(line.get("groups"), list):
            raise ValueError("a line without a step or groups")
        known = self.steps.setdefault(split, {})
        if split == batches.TRAIN:  # a step that was trained again replaces itself
            known[step] = [line]
        else:
            known.setdefault(step, []).append(line)

    def of(self, split: str) -> dict[int, list[Json]]:
        return dict(sorted(self.steps.get(split, {}).items()))


class Run:
    """One run's directory."""

    def __init__(self, project: str, name: str, directory: Path) -> None:
        self.project = project
        self.name = name
        self.directory = directory
        self._history = History(directory)
        self._groups = GroupMeans(directory)
        self._listed: tuple[tuple[int, ...], dict[str, list[int]], list[str]] | None = None
        self._memos: dict[str, tuple[object, Any]] = {}

    def memo(self, name: str, version: object, compute: Callable[[], T]) -> T:
        """The result of `compute`, again only if `version` has changed."""
        found = self._memos.get(name)
        if found is None or found[0] != version:
            found = self._memos[name] = version, compute()
        result: T = found[1]
        return result

    @property
    def history(self) -> History:
        self._history.lines.read()
        return self._history

    @property
    def groups(self) -> GroupMeans:
        self._groups.lines.read()
        return self._groups

    def kept(self) -> dict[str, list[int]]:
        """The steps whose attempts are on disk, by split."""
        return self._list()[1]

    def cut_files(self) -> list[str]:
        """The names of kept files that are shorter than their header says."""
        return self._list()[2]

    def _list(self) -> tuple[tuple[int, ...], dict[str, list[int]], list[str]]:
        try:
            changed, settled = identity(self.directory / BATCHES)
        except OSError:
            return (), {}, []
        if self._listed is None or self._listed[0] != changed:
            kept = batches.kept_steps(self.directory)
            paths = [
                batches.path_of(self.directory, step, split)
                for split, steps in kept.items()
                for step in steps
            ]
            listed = changed, kept, sorted(path.name for path in paths if _is_cut(path))
            self._listed = listed if settled else None
            return listed
        return self._listed

    def newest_checkpoint(self) -> int | None:
        steps: list[int] = []
        with contextlib.suppress(OSError):
            names = os.listdir(self.directory / CHECKPOINTS)
            steps = [int(name) for name in names if STEP_NAME.fullmatch(name)]
        return max(steps, default=None)

    def manifest(self) -> Json:
        """The manifest of the newest checkpoint, or nothing."""
        step = self.newest_checkpoint()
        return {} if step is None else read_manifest(checkpoint_path(self.directory, step)) or {}

    def step(self) -> int:
        """The newest step that is trained."""
        return max([self.newest_checkpoint() or 0, *self.history.trained()[-1:]])

    def times(self) -> tuple[float | None, float | None]:
        """When the run began and when it changed last."""
        found = [
            path.stat().st_mtime
            for name in (HISTORY, BATCHES, CHECKPOINTS)
            if (path := self.directory / name).exists()
        ]
        begun = min(self.history.recorded.values(), default=None)
        return begun, max(found, default=None)


class Runs:
    """The runs below a directory: a server's state, what was pulled, a project, or one run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._runs: dict[Path, Run] = {}
        self._lock = threading.Lock()

    def all(self) -> list[Run]:
        with self._lock:
            found = {}
            for project, directory in sorted(find_directories(self.root)):
                known = self._runs.get(directory)
                found[directory] = known or Run(project, directory.name, directory)
            self._runs = found
            return list(found.values())

    def get(self, project: str, name: str) -> Run:
        for runs in (self._runs.values, self.all):  # a run that is known needs no search
            for run in list(runs()):
                if (run.project, run.name) == (project, name) and run.directory.is_dir():
                    return run
        raise NotFound(f"There is no run `{project}/{name}`", hint="`/api/runs` lists the runs")


def find_directories(root: Path) -> Iterator[tuple[str, Path]]:
    """The project and directory of every run below `root`."""
    root = root.absolute()
    if _is_run(root):
        parent = root.parent
        yield (parent.parent.name if parent.name == MODELS else parent.name), root
        return
    for pattern in (MODEL_GLOB, f"{MODELS}/*"):
        for path in root.glob(pattern):
            if path.is_dir() and not path.name.startswith("."):
                yield path.parent.parent.name, path
    for path in root.glob("*"):
        if path.is_dir() and path.name != MODELS and _is_run(path):
            yield root.name, path


def _is_run(path: Path) -> bool:
    return any((path / part).exists() for part in _PARTS)


def is_finite(value: object) -> bool:
    """Whether a value is a number that JSON can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer may be too large for a double
        return False


def finite(value: object) -> float | None:
    return float(value) if is_finite(value) else None  # type: ignore[arg-type]


def _is_cut(path: Path) -> bool:
    """Whether a file of SQLite lacks pages, by the number of pages in its header."""
    try:
        with path.open("rb") as file:
            header = file.read(100)
        if len(header) < 100 or not header.startswith(b"SQLite format 3\0"):
            return True
        (size,) = struct.unpack(">H", header[16:18])
        (pages,) = struct.unpack(">I", header[28:32])
        return bool(path.stat().st_size < (65536 if size == 1 else size) * pages)
    except OSError:
        return True
