"""Trajectories that clients log, and metrics by step, in ART's files.

`trajectories/SPLIT/0007.jsonl` holds one group per line, `history.jsonl` one line of metrics per
call.
"""

import contextlib
import logging
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kit.files import append_lines, read_lines
from kit.state_dir import HISTORY, TRAJECTORIES, step_name
from kit.types import Json
from trainer.errors import BadRequest
from trainer.rewards import reward_of

logger = logging.getLogger(__name__)


def log(directory: Path, step: int, groups: Sequence[Json], split: str) -> dict[str, float]:
    """Store `groups` under `step` and append their averages, as `SPLIT/NAME`."""
    means = averages(groups)  # first, because groups without averages are not stored
    store(directory, step, groups, split)
    line = {f"{split}/{name}": value for name, value in means.items()}
    append(directory, {"step": step, **line})
    return line


def store(directory: Path, step: int, groups: Sequence[Json], split: str) -> None:
    """Append the trajectories of `groups` to those of the step."""
    path = directory / TRAJECTORIES / split / f"{step_name(step)}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    append_lines(path, ({"trajectories": _members(group)} for group in groups))


def append(directory: Path, line: Json) -> None:
    """Append a line of metrics to the history, with the current time."""
    directory.mkdir(parents=True, exist_ok=True)
    append_lines(directory / HISTORY, [{**line, "recorded_at": time.time()}])


def averages(groups: Sequence[Json]) -> dict[str, float]:
    """ART's averages: reward, its deviation within groups, exception rate, and all metrics."""
    values: dict[str, list[float]] = {"reward": [], "exception_rate": []}
    spreads = []
    for index, group in enumerate(groups):
        members = _members(group)
        rewards = [reward_of(member, index, at) for at, member in enumerate(members)]
        if len(rewards) > 1:
            spreads.append(statistics.pstdev(rewards))
        values["reward"] += rewards
        values["exception_rate"] += [0.0] * len(members)
        values["exception_rate"] += [1.0] * len(group.get("exceptions") or [])
        for member in members:
            metrics = member.get("metrics") or {}
            if not isinstance(metrics, dict):
                raise BadRequest(f"A trajectory's `metrics` is `{metrics}`", hint="Send an object")
            for name, value in metrics.items():
                values.setdefault(name, []).append(_number(value, name))
    means = {name: _mean(found) for name, found in values.items() if found}
    means["reward_std_dev"] = statistics.fmean(spreads) if spreads else 0.0
    return {name: value for name, value in means.items() if math.isfinite(value)}


def by_step(directory: Path) -> dict[int, dict[str, float]]:
    """The mean of every logged metric, for each step."""
    found: dict[int, dict[str, list[float]]] = {}
    for line in _lines(directory / HISTORY):
        step = line.pop("step", None)
        if not isinstance(step, int):
            continue
        metrics = found.setdefault(step, {})
        line.pop("recorded_at", None)
        for name, value in line.items():
            if isinstance(value, int | float):
                metrics.setdefault(name, []).append(value)
    return {
        step: {name: _mean(values) for name, values in metrics.items()}
        for step, metrics in sorted(found.items())
    }


def smoothed(directory: Path, benchmark: str, alpha: float) -> dict[int, float]:
    """The exponential moving average of `benchmark` by step; an `alpha` of 1 does not smooth."""
    if not 0 < alpha <= 1:
        raise BadRequest(
            f"`benchmark_smoothing` is `{alpha}`", hint="Use a number above 0 and at most 1"
        )
    result: dict[int, float] = {}
    total = weight = 0.0
    for step, metrics in by_step(directory).items():
        if benchmark in metrics:
            total = total * (1 - alpha) + metrics[benchmark]
            weight = weight * (1 - alpha) + 1
            result[step] = total / weight
    return result


def _lines(path: Path) -> list[Json]:
    found = read_lines(path)
    if found.skipped:
        logger.warning("`%s`: skipping lines that are not JSON objects: %s", path, found.skipped)
    return found.rows


def _members(group: Json) -> list[Json]:
    return list(group.get("trajectories") or [])


def _number(value: Any, name: str) -> float:
    if isinstance(value, int | float):
        with contextlib.suppress(OverflowError):  # an integer may be too large for a double
            return float(value)
        value = f"an integer of {int(value).bit_length()} bits"
    raise BadRequest(f"A trajectory's `{name}` is `{value}`", hint="Metrics are numbers")


def _mean(values: Sequence[float]) -> float:
    """The mean, also of values whose sum is no double."""
    try:
        return statistics.fmean(values)
    except OverflowError:
        return math.fsum(value / len(values) for value in values)
    except ValueError:  # infinities of both signs
        return math.nan
