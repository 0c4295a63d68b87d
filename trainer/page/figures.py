"""Plots of a report, as SVG elements: lines over steps with a band, axes and a legend."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement

Values = Sequence[float | None]
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 8, 24


@dataclass(frozen=True)
class Line:
    label: str
    values: Values
    tone: str = "accent"
    """Class of the line: `accent` or `ink`."""


@dataclass(frozen=True)
class Scale:
    """Maps numbers from `low` to `high` to places from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)


def plot(
    title: str,
    steps: Sequence[int],
    lines: Sequence[Line],
    *,
    band: tuple[Values, Values] | None = None,
    width: int = 340,
    height: int = 150,
) -> Element:
    """A figure with a plot of `lines` over `steps`; null values leave gaps."""
    figure = Element("figure")
    caption = SubElement(figure, "figcaption")
    SubElement(caption, "span").text = title
    for line in lines:
        _legend(caption, line, named=len(lines) > 1)
    label = f"{title}, over {len(steps)} steps"
    size = {"viewBox": f"0 0 {width} {height}", "role": "img", "aria-label": label}
    svg = SubElement(figure, "svg", size)
    shown = [value for line in lines for value in line.values if value is not None]
    shown += [value for edge in band or () for value in edge if value is not None]
    low, high = _room(min(shown), max(shown))
    first, last = (steps[0], steps[-1]) if steps[0] < steps[-1] else (steps[0] - 1, steps[0] + 1)
    x = Scale(first, last, LEFT, width - RIGHT)
    y = Scale(low, high, height - BOTTOM, TOP)
    _axes(svg, x, y, width)
    if band:
        _band(svg, steps, band, x, y)
    for line in lines:
        points = [
            (x(step), y(value))
            for step, value in zip(steps, line.values, strict=True)
            if value is not None
        ]
        if len(points) == 1:
            (cx, cy) = points[0]
            SubElement(svg, "circle", {"class": line.tone, "cx": str(cx), "cy": str(cy), "r": "3"})
        path = " ".join(f"{px},{py}" for px, py in points)
        SubElement(svg, "polyline", {"class": line.tone, "points": path})
    return figure


def _legend(caption: Element, line: Line, *, named: bool) -> None:
    known = [value for value in line.values if value is not None]
    entry = SubElement(caption, "span", {"class": f"value {line.tone}"})
    entry.text = f"{line.label} {known[-1]:.4g}" if named else f"{known[-1]:.4g}"


def _band(
    svg: Element, steps: Sequence[int], band: tuple[Values, Values], x: Scale, y: Scale
) -> None:
    known = [
        (x(step), y(low), y(high))
        for step, low, high in zip(steps, *band, strict=True)
        if low is not None and high is not None
    ]
    edge = [(px, high) for px, _, high in known] + [(px, low) for px, low, _ in reversed(known)]
    SubElement(
        svg, "polygon", {"class": "band", "points": " ".join(f"{px},{py}" for px, py in edge)}
    )


def _axes(svg: Element, x: Scale, y: Scale, width: int) -> None:
    for value in ticks(y.low, y.high, 4):
        place = str(y(value))
        ends = {"x1": str(LEFT), "x2": str(width - RIGHT), "y1": place, "y2": place}
        SubElement(svg, "line", {"class": "grid", **ends})
        text = SubElement(svg, "text", {"x": str(LEFT - 6), "y": place, "class": "y"})
        text.text = f"{value:.4g}"
    for value in ticks(x.low, x.high, 6):
        if value == int(value):
            under = {"x": str(x(value)), "y": str(y.start + 16)}
            SubElement(svg, "text", {**under, "class": "x"}).text = str(int(value))


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers from `low` to `high`, about as many as `about`."""
    raw = (high - low) / about
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * part for part in (1, 2, 5, 10) if size * part >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(at * step, 12) for at in range(first, math.floor(high / step + 1e-9) + 1)]


def _room(low: float, high: float) -> tuple[float, float]:
    """A little room around the values; a constant gets some too."""
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        half = abs(low) * 0.1 or 0.5
        return low - half, high + half
    margin = (high - low) * 0.06
    return (0.0 if low >= 0 > low - margin else low - margin), high + margin
