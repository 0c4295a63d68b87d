"""Draws the packed rows of a step for `plot_tensors`, one line of pixels per row."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainer.learner.pack import Row

NAME = "packed_tensors.png"
Panel = NDArray[np.float64]


def plot_rows(rows: Sequence[Row], path: Path) -> None:
    """Draw the data of every token in `rows`. White means that a token has no value."""
    # Not through pyplot, which keeps every figure and selects a window system.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = panels_of(rows)
    lines = math.ceil(len(panels) / 2)
    figure = Figure(figsize=(15, 2.5 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (title, values) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(lines, 2, place)
        image = axes.imshow(values, aspect="auto", interpolation="nearest", cmap="viridis")
        axes.set(title=title, xlabel="token of the row", ylabel="row", yticks=range(len(rows)))
        figure.colorbar(image, ax=axes)
    figure.savefig(path, dpi=100)


def panels_of(rows: Sequence[Row]) -> dict[str, Panel]:
    """The panels to draw: title -> [rows, tokens], NaN where there is no value.

    Values of a chosen token are drawn at the token that predicts it. At a fork one token predicts
    several, and their mean is drawn.
    """
    return {
        "Token ids": _panel(rows, lambda row: row.tokens.tolist()),
        "Segments of the tree": _panel(rows, lambda row: row.segments.tolist()),
        "Positions": _panel(rows, lambda row: row.positions.tolist()),
        "Chosen tokens predicted here": _panel(rows, lambda row: _count(row)),
        "Sampler's logprobs": _panel(rows, lambda row: _mean(row, row.sampler_logprobs.tolist())),
        "Advantages": _panel(rows, lambda row: _mean(row, row.advantages.tolist())),
        "Weights": _panel(rows, lambda row: _mean(row, row.weights.tolist())),
        "Sequences": _panel(rows, lambda row: _mean(row, row.sequences.tolist())),
    }


def _panel(rows: Sequence[Row], values: Callable[[Row], Sequence[float] | Panel]) -> Panel:
    panel = np.full((len(rows), max(len(row.tokens) for row in rows)), np.nan)
    for line, row in enumerate(rows):
        row_values = values(row)
        panel[line, : len(row_values)] = row_values
    return panel


def _count(row: Row) -> Panel:
    return np.bincount(row.predictors.cpu().numpy(), minlength=len(row.tokens)).astype(np.float64)


def _mean(row: Row, values: Sequence[float]) -> Panel:
    count = _count(row)
    total = np.bincount(row.predictors.cpu().numpy(), weights=values, minlength=len(row.tokens))
    mean: Panel = np.divide(total, count, out=np.full(len(count), np.nan), where=count > 0)
    return mean
