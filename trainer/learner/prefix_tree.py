"""The token sequences of a group as a tree, in which every shared prefix is stored once."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass
class Sample:
    """One token sequence with the data that the loss needs."""

    ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    advantage: float
    weight: float
    group: int  # only sequences of one group share prefixes
    trajectory: int
    number: int = 0  # of the trajectory in its group

    @cached_property
    def array(self) -> Ids:
        return np.asarray(self.ids, dtype=np.int64)

    @cached_property
    def chosen(self) -> Ids:
        """Places of the chosen tokens; the first token of all is predicted by none."""
        return np.flatnonzero(np.asarray(self.mask[1:])) + 1

    @cached_property
    def inputs(self) -> int:
        """Number of tokens the model must read: up to the last that predicts a chosen token."""
        return len(self.mask) - 1 - self.mask[::-1].index(True)

    @property
    def read(self) -> Ids:
        """The tokens that the model must read."""
        return self.array[: self.inputs]


@dataclass
class _Segment:
    ids: Ids
    start: int
    parent: int | None
    children: dict[int, int] = field(default_factory=dict)  # first token -> segment


class PrefixTree:
    """The sequences of one group, with every shared prefix stored once."""

    def __init__(self) -> None:
        self.segments: list[_Segment] = []
        self.roots: dict[int, int] = {}
        self.samples: list[Sample] = []
        self.size = 0

    def cost(self, ids: Ids) -> int:
        """The number of tokens that `ids` would add."""
        return len(ids) - self._walk(ids)[1]

    def add(self, sample: Sample) -> None:
        ids = sample.read
        at, matched, inside = self._walk(ids)
        if at is not None and inside < len(self.segments[at].ids):
            self._split(at, inside)
        if matched < len(ids):
            self._attach(at, _Segment(ids[matched:], matched, at))
            self.size += len(ids) - matched
        self.samples.append(sample)

    def path(self, ids: Ids) -> list[int]:
        """The segments from the root to the end of `ids`, which must be in the tree."""
        at, children, found = 0, self.roots, []
        while at < len(ids):
            index = children[int(ids[at])]
            found.append(index)
            at += len(self.segments[index].ids)
            children = self.segments[index].children
        return found

    def order(self) -> list[int]:
        """The segments in depth-first order, parents before children."""
        stack, order = list(reversed(self.roots.values())), []
        while stack:
            index = stack.pop()
            order.append(index)
            stack += reversed(self.segments[index].children.values())
        return order

    def _walk(self, ids: Ids) -> tuple[int | None, int, int]:
        """Return the segment reached, all tokens matched, and those matched in that segment."""
        at: int | None = None
        matched, inside, children = 0, 0, self.roots
        while matched < len(ids) and int(ids[matched]) in children:
            at = children[int(ids[matched])]
            segment = self.segments[at]
            length = min(len(segment.ids), len(ids) - matched)
            differs = np.nonzero(segment.ids[:length] != ids[matched : matched + length])[0]
            inside = int(differs[0]) if len(differs) else length
            matched += inside
            if inside < len(segment.ids):
                break
            children = segment.children
        return at, matched, inside

    def _split(self, at: int, inside: int) -> None:
        """Split a segment in two. Its index keeps the upper part."""
        segment = self.segments[at]
        lower = _Segment(segment.ids[inside:], segment.start + inside, at, segment.children)
        for child in lower.children.values():
            self.segments[child].parent = len(self.segments)
        segment.ids, segment.children = segment.ids[:inside], {}
        self._attach(at, lower)

    def _attach(self, parent: int | None, segment: _Segment) -> None:
        children = self.roots if parent is None else self.segments[parent].children
        children[int(segment.ids[0])] = len(self.segments)
        self.segments.append(segment)
