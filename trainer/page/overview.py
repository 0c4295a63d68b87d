"""What the top of the page says of a run: its verdict, what is missing, checkpoints and config."""

import itertools
import os
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from kit.errors import plural
from kit.manifest import MANIFEST, read_manifest
from kit.state_dir import BATCHES, CHECKPOINTS, HISTORY, LOGS, STEP_NAME
from kit.types import Json
from trainer.doctor import RECENT, findings_of
from trainer.page import batches
from trainer.page.lines import tail
from trainer.page.reader import Run, finite

State = Literal["training", "sampling", "idle", "ended", "degraded"]
PLANNED = "steps_planned"
"""Metric or setting by which a client says how many steps it will train."""
_ADAPTER = "adapter_model.safetensors"


def summary(run: Run, *, live: bool) -> Json:
    """A run in the list of runs."""
    rewards = [row["train/reward"] for row in _rows(run) if "train/reward" in row]
    return {
        **{"project": run.project, "name": run.name, "live": live, "step": run.step()},
        "base_model": run.manifest().get("base_model"),
        "updated": run.times()[1],
        "reward": rewards[-1] if rewards else None,
    }


def overview(run: Run, state: State) -> Json:
    """Everything about a run that is shown before a step is opened."""
    created, updated = run.times()
    about = {"project": run.project, "name": run.name, "created": created, "updated": updated}
    manifest = run.manifest()
    return {
        "run": {**about, "base_model": manifest.get("base_model")},
        "verdict": verdict(run, state, manifest),
        "missing": missing(run),
        "config": config(run),
        "columns": run.history.columns(),
    }


def _rows(run: Run) -> list[Mapping[str, float]]:
    history = run.history
    return [history.steps[step] for step in sorted(history.steps)]


def verdict(run: Run, state: State, manifest: Json) -> Json:
    history = run.history
    trained = history.trained()
    rows: list[Json] = [dict(history.steps[step]) for step in trained[-RECENT:]]
    pace = seconds_per_step(history.recorded)
    planned = _planned(rows, manifest)
    step = run.step()
    left = None
    if planned is not None and pace is not None and state != "ended":
        left = max(planned - step, 0) * pace
    return {
        "state": state,
        "sentences": _sentences(run, step, planned, left),
        "findings": [vars(finding) for finding in findings_of(rows, run.name)],
        **{"step": step, "seconds_per_step": pace, "seconds_left": left, "steps_planned": planned},
    }


def _planned(rows: list[Json], manifest: Json) -> int | None:
    settings = manifest.get("config")
    found = rows[-1].get(PLANNED) if rows else None
    if found is None and isinstance(settings, dict):
        found = settings.get("max_steps")
    number = finite(found)
    return int(number) if number and number > 0 else None


def seconds_per_step(recorded: Mapping[int, float]) -> float | None:
    """The median time between the newest steps, with their sampling."""
    times = [recorded[step] for step in sorted(recorded)[-RECENT - 1 :]]
    gaps = [after - before for before, after in itertools.pairwise(times) if after >= before]
    return statistics.median(gaps) if gaps else None


def _sentences(run: Run, step: int, planned: int | None, left: float | None) -> list[str]:
    history = run.history
    if not history.trained():
        return ["No step has been trained yet"]
    of = f" of {planned}" if planned else ""
    time_left = f", about {_duration(left)} left" if left else ""
    found = [f"Step {step}{of}{time_left}"]
    for name, title in (("train/reward", "Training reward"), ("val/reward", "Validation reward")):
        points = [
            (at, history.steps[at][name])
            for at in sorted(history.steps)
            if name in history.steps[at]
        ]
        if points:
            (first, begun), (_, now) = points[0], points[-1]
            change = f", {now - begun:+.3f} since step {first}" if len(points) > 1 else ""
            found.append(f"{title} {now:.3f}{change}")
    return found


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    if seconds < 5400:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours"


def missing(run: Run) -> list[str]:
    """What is absent or damaged, in sentences."""
    history = run.history
    found = []
    if not history.lines.exists:
        found.append(f"There is no `{HISTORY}`: no step was trained, or it was not pulled")
    for lines in (history.lines, run.groups.lines):
        if lines.broken:
            many = plural(lines.broken, "line")
            found.append(f"{many} of `{lines.path.name}` cannot be read and are left out")
        if lines.incomplete:
            found.append(f"The last line of `{lines.path.name}` is not complete")
    if history.not_finite:
        many = plural(history.not_finite, "value")
        found.append(f"{many} in `{HISTORY}` are not finite and are left out")
    kept = set(run.kept().get(batches.TRAIN, []))
    absent = [step for step in history.trained() if step not in kept]
    if absent:
        steps = f"step {absent[0]}" if len(absent) == 1 else f"{len(absent)} steps"
        ends = "" if len(absent) == 1 else f" from {absent[0]} to {absent[-1]}"
        found.append(
            f"The attempts of {steps}{ends} are not in `{BATCHES}`: not recorded, not pulled, or "
            "deleted to stay within `--keep-rollouts`"
        )
    found += [f"`{BATCHES}/{name}` is damaged" for name in run.cut_files()]
    return found


def config(run: Run) -> Json:
    """The settings of the newest checkpoint."""
    manifest = run.manifest()
    return {name: manifest.get(name) for name in ("base_model", "lora", "config") if manifest}


def checkpoints(run: Run, served: set[int]) -> list[Json]:
    """The checkpoints on disk, newest first, as their manifests describe them."""
    try:
        names = os.listdir(run.directory / CHECKPOINTS)
    except OSError:
        return []
    steps = sorted((int(name) for name in names if STEP_NAME.fullmatch(name)), reverse=True)
    return [_checkpoint(run, step, step in served) for step in steps]


def _checkpoint(run: Run, step: int, served: bool) -> Json:
    path = run.directory / CHECKPOINTS / f"{step:04d}"
    try:
        changed = (path / MANIFEST).stat().st_mtime
    except OSError:
        changed = None
    about = run.memo(f"checkpoint/{step}", changed, lambda: _manifest(path))
    return {"step": step, **about, "served": served, "created": changed, "verified": None}


def _manifest(path: Path) -> Json:
    manifest = read_manifest(path)
    if manifest is None:
        return {"sha256": None, "parent": None, "size": None}
    files = manifest["files"].values()
    return {
        "sha256": manifest["files"].get(_ADAPTER, {}).get("sha256"),
        "parent": manifest.get("parent"),
        "size": sum(int(file.get("bytes", 0)) for file in files),
    }


def logs(root: Path, count: int) -> list[str]:
    """The last lines of each log below the state directory, after the name of the log."""
    lines = []
    for path in sorted((root / LOGS).glob("*.log")):
        lines += [f"{path.stem}: {line}" for line in tail(path, count)]
    return lines
