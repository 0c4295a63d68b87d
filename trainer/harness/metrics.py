"""Metrics of an epoch, and reading and writing the files that hold them."""

import json
import math
import os
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kit.types import Json
from trainer.harness.types import WorkflowRun


def reward_summary(rewards: Sequence[float], prefix: str = "") -> dict[str, float]:
    """Return mean, minimum, maximum and standard deviation, or nothing if there are no rewards."""
    if not rewards:
        return {}
    return {
        f"{prefix}avg_reward": statistics.fmean(rewards),
        f"{prefix}min_reward": min(rewards),
        f"{prefix}max_reward": max(rewards),
        f"{prefix}reward_std_dev": statistics.pstdev(rewards),
    }


def mean_metrics(runs: Iterable[WorkflowRun]) -> dict[str, float]:
    """Return the mean of each metric over the runs that have it."""
    values: dict[str, list[float]] = {}
    for run in runs:
        if run.failure is None:
            for name, value in run.metrics.items():
                values.setdefault(name, []).append(value)
    return {name: statistics.fmean(numbers) for name, numbers in sorted(values.items())}


def write_json(path: Path, value: Any) -> None:
    """Replace `path` atomically: a kill leaves the old or the new file, never a partial one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(_clean(value), file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_jsonl(path: Path, rows: Iterable[Json]) -> None:
    """Replace `path` with a file of one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        # `default=str`: an agent may output any object, and must not make the epoch fail.
        file.writelines(json.dumps(_clean(row), default=str) + "\n" for row in rows)
    temporary.replace(path)


def read_json(path: Path, default: Any) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else default


def read_jsonl(path: Path) -> list[Json]:
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def _clean(value: Any) -> Any:
    """Replace NaN and infinities by None, because JSON has neither."""
    if isinstance(value, dict):
        return {str(name): _clean(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
