"""Groups by example: mean, spread and trend over the steps that trained on it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from kit.types import Json
from trainer.page import batches
from trainer.page.reader import Run, finite

Order = Literal["spread", "mean", "trend", "example"]
MOST_STEPS = 200
"""Steps of an example that a row lists, the newest."""


@dataclass
class Example:
    """What is known of one example over the steps of a run."""

    name: str
    n: int = 0
    steps: list[int] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    spreads: list[float] = field(default_factory=list)

    @property
    def mean(self) -> float | None:
        return _mean(self.means)

    @property
    def spread(self) -> float | None:
        return _mean(self.spreads)

    @property
    def trend(self) -> float | None:
        return slope(self.steps, self.means)

    def row(self) -> Json:
        return {
            **{"example": self.name, "n": self.n, "mean": self.mean, "spread": self.spread},
            "trend": self.trend,
            **{"steps": self.steps[-MOST_STEPS:], "means": self.means[-MOST_STEPS:]},
        }


def examples(
    run: Run,
    *,
    order: Order = "spread",
    offset: int = 0,
    limit: int = 100,
    split: str = batches.TRAIN,
) -> Json:
    """A page of the examples: the widest spread, lowest mean or lowest trend first."""
    found = list(by_example(run, split).values())
    if order == "example":
        found.sort(key=lambda it: it.name)
    else:
        sign = -1 if order == "spread" else 1
        values = {id(it): getattr(it, order) for it in found}
        found.sort(key=lambda it: (values[id(it)] is None, sign * (values[id(it)] or 0.0), it.name))
    return {"total": len(found), "rows": [it.row() for it in found[offset : offset + limit]]}


def by_example(run: Run, split: str = batches.TRAIN) -> dict[str, Example]:
    """Every example that the run has seen, by its name."""
    groups = run.groups
    return run.memo(f"examples/{split}", groups.lines.version, lambda: _collect(groups.of(split)))


def means_at(run: Run, split: str, step: int) -> dict[str, float]:
    """The mean reward of each example at one step."""
    found = _collect({step: run.groups.of(split).get(step, [])})
    return {name: mean for name, it in found.items() if (mean := it.mean) is not None}


def _collect(steps: dict[int, list[Json]]) -> dict[str, Example]:
    found: dict[str, Example] = {}
    for step, lines in steps.items():
        for name, size, mean, spread in (group for line in lines for group in line["groups"]):
            value = finite(mean)
            if name is None or value is None:
                continue
            example = found.setdefault(str(name), Example(str(name)))
            example.n += size
            example.steps.append(step)
            example.means.append(value)
            example.spreads.append(finite(spread) or 0.0)
    return found


def slope(steps: Sequence[float], values: Sequence[float]) -> float | None:
    """The slope of the straight line with the least squared error, or None for one step."""
    count = len(steps)
    if count < 2 or min(steps) == max(steps):
        return None
    middle, mean = sum(steps) / count, sum(values) / count
    square = sum((step - middle) ** 2 for step in steps)
    pairs = zip(steps, values, strict=True)
    return sum((step - middle) * (value - mean) for step, value in pairs) / square


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
