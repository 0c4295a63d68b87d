"""Columns of numbers by step: the metrics of a run, thinned out for a plot, and its steps."""

import itertools
import math
from collections.abc import Sequence

from kit.types import Json
from trainer.page import batches
from trainer.page.reader import Run

Column = list[float | None]


def series(run: Run, names: Sequence[str], *, since: int = 0, points: int = 1000) -> Json:
    """The metrics `names` from step `since` on; more than `points` steps become ranges.

    A range of steps has the mean of each metric, and beside it `NAME:min` and `NAME:max`.
    """
    history = run.history
    wanted = [step for step in sorted(history.steps) if step >= since]
    means = [history.steps[step] for step in wanted]
    columns: dict[str, Column] = {name: [row.get(name) for row in means] for name in names}
    if len(wanted) <= points * 1.1:  # a few more do no harm
        return {"step": wanted, "series": columns, "reduced": False}
    last = len(wanted) - 1
    # The first and the last step stay as they are: a reader compares them.
    starts = [0, *range(1, last, math.ceil((last - 1) / points)), last]
    ranges = list(itertools.pairwise([*starts, len(wanted)]))
    reduced: dict[str, Column] = {}
    for name, column in columns.items():
        parts = [[it for it in column[low:high] if it is not None] for low, high in ranges]
        reduced[name] = [sum(part) / len(part) if part else None for part in parts]
        reduced[f"{name}:min"] = [min(part, default=None) for part in parts]
        reduced[f"{name}:max"] = [max(part, default=None) for part in parts]
    # A range stands at its last step, so that the newest step is always there.
    return {"step": [wanted[high - 1] for _, high in ranges], "series": reduced, "reduced": True}


_STEP_COLUMNS = {
    "reward": "train/reward",
    "trainable": "data/step_num_groups_trainable",
    "groups": "data/step_num_groups_submitted",
    "attempts": "data/step_num_trajectories",
    "seconds": "time/step_s",
}


def steps(run: Run, *, since: int = 0, limit: int = 1000) -> Json:
    """The newest `limit` trained steps from `since` on."""
    history = run.history
    kept = run.kept()
    trained = set(history.trained()) | set(kept.get(batches.TRAIN, []))
    wanted = [step for step in sorted(trained) if step >= since][-limit:]
    on_disk = set(kept.get(batches.TRAIN, []))
    splits = {split: set(found) for split, found in kept.items() if split != batches.TRAIN}
    means = [history.steps.get(step, {}) for step in wanted]
    return {
        "step": wanted,
        **{column: [row.get(name) for row in means] for column, name in _STEP_COLUMNS.items()},
        "kept": [step in on_disk for step in wanted],
        "splits": [
            [split for split, found in sorted(splits.items()) if step in found] for step in wanted
        ],
    }
