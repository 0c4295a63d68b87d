"""Packs groups of token sequences into rows in which every shared prefix is computed once.

The sequences of a group form a tree: a prompt, the completions that fork from it, and their forks
in later turns. A row stores one or more trees depth first. A token attends to itself, to earlier
tokens of its segment and to the segments above. The token after a fork is predicted from the last
shared position, so nothing is stored twice or padded.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.policy.cpu_attention import Block, plan_blocks

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Ids = NDArray[np.int64]
Column = NDArray[np.int64] | NDArray[np.float64]


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


@dataclass(frozen=True)
class Row:
    """One packed row of T tokens that predict N chosen tokens."""

    tokens: Tensor  # [T]
    positions: Tensor  # [T] position of each token in its own sequence
    segments: Tensor  # [T] segment of the tree
    ends: Ids  # [T] end in the row of the subtree of each token's segment; stays on the CPU
    ancestors: Tensor  # [S, S] True where a segment attends to another or to itself
    predictors: Tensor  # [N] index in the row of the token before each chosen one
    targets: Tensor  # [N] the chosen tokens
    sampler_logprobs: Tensor  # [N] the sampler's; NaN where unknown
    advantages: Tensor  # [N]
    weights: Tensor  # [N]
    sequences: Tensor  # [N] number of the sequence that a chosen token belongs to
    trajectories: int
    unshared: int  # number of tokens that the row would have without sharing
    capacity: int  # maximum number of tokens of a row, the same for every row of a step
    separate: tuple[int, ...] = ()
    """Number of tokens of each sequence, if no two sequences share any."""
    samples: tuple[Sample, ...] = ()  # in the order of their chosen tokens

    def mask(self) -> Tensor:
        """[T, T] True where a query (first axis) attends to a key."""
        length, device = len(self.tokens), self.tokens.device
        causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        return causal & self.ancestors[self.segments][:, self.segments]

    def attention_mask(self) -> "list[Block] | BlockMask":
        """The same mask in a form that lets the row's device skip hidden parts."""
        if self.tokens.is_cuda:
            return self._flex_mask()
        lengths = torch.bincount(self.segments, minlength=len(self.ancestors))
        return plan_blocks(self.mask(), lengths.tolist())

    def _flex_mask(self) -> "BlockMask":
        from torch.nn.attention.flex_attention import create_block_mask

        segments, ancestors, length = self.segments, self.ancestors, len(self.tokens)

        def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & ancestors[segments[query], segments[key]]

        return create_block_mask(visible, None, None, length, length, device=segments.device)

    def to(self, device: torch.device) -> "Row":
        moved = {name: value.to(device) for name, value in vars(self).items() if name in TENSORS}
        return replace(self, **moved)


TENSORS = frozenset(item.name for item in fields(Row) if item.type is Tensor)


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


def pack(samples: Sequence[Sample], *, length: int | None, share: bool = True) -> list[Row]:
    """Pack `samples` into rows of at most `length` tokens. None fits the longest sample."""
    longest = max(sample.inputs for sample in samples)
    if length is None:
        length = math.ceil(longest / 2048) * 2048
    assert longest <= length, "the caller drops samples that do not fit"
    bins: list[list[PrefixTree]] = []
    for tree in sorted(_trees(samples, length, share), key=lambda tree: -tree.size):
        for trees in bins:
            if sum(other.size for other in trees) + tree.size <= length:
                trees.append(tree)
                break
        else:
            bins.append([tree])
    return [_row(trees, length) for trees in bins]


def _trees(samples: Sequence[Sample], length: int, share: bool) -> list[PrefixTree]:
    """One tree per group, or several if the group does not fit into one row."""
    groups: dict[int, list[Sample]] = {}
    for number, sample in enumerate(samples):
        groups.setdefault(sample.group if share else number, []).append(sample)
    trees = []
    for group in groups.values():
        tree = PrefixTree()
        # Sorted by tokens, samples that share the longest prefixes stay together.
        for sample in sorted(group, key=lambda sample: sample.ids):
            if tree.size + tree.cost(sample.read) > length:
                trees.append(tree)
                tree = PrefixTree()
            tree.add(sample)
        trees.append(tree)
    return trees


def _row(trees: list[PrefixTree], capacity: int) -> Row:
    tokens: list[Ids] = []
    positions: list[Ids] = []
    segments: list[Ids] = []
    chosen: list[list[Column]] = []
    ancestors = torch.zeros(0, 0, dtype=torch.bool)
    size = sequences = 0
    for tree in trees:
        offsets = {}  # segment -> its offset in the row
        base, order = len(ancestors), tree.order()
        ancestors = torch.block_diag(ancestors, _ancestors(tree, order))  # type: ignore[no-untyped-call]
        for number, index in enumerate(order):
            segment = tree.segments[index]
            offsets[index] = size
            tokens.append(segment.ids)
            positions.append(np.arange(segment.start, segment.start + len(segment.ids)))
            segments.append(np.full(len(segment.ids), base + number))
            size += len(segment.ids)
        for sample in tree.samples:
            chosen.append(_chosen(tree, sample, offsets, sequences))
            sequences += 1
    samples = [sample for tree in trees for sample in tree.samples]
    columns = [torch.from_numpy(np.concatenate(parts)) for parts in zip(*chosen, strict=True)]
    last = np.cumsum([len(ids) for ids in tokens])  # [S] end of each segment
    below = np.where(ancestors, last[:, None], 0).max(axis=0)  # [S] end of each segment's subtree
    return Row(
        tokens=torch.from_numpy(np.concatenate(tokens)),
        positions=torch.from_numpy(np.concatenate(positions)),
        segments=torch.from_numpy(np.concatenate(segments)),
        ends=below[np.concatenate(segments)],
        ancestors=ancestors.bool(),
        predictors=columns[0],
        targets=columns[1],
        sampler_logprobs=columns[2].float(),
        advantages=columns[3].float(),
        weights=columns[4].float(),
        sequences=columns[5],
        trajectories=len({sample.trajectory for sample in samples}),
        unshared=sum(sample.inputs for sample in samples),
        capacity=capacity,
        separate=tuple(tree.size for tree in trees)
        if all(len(tree.segments) == 1 for tree in trees)
        else (),
        samples=tuple(samples),
    )


def _ancestors(tree: PrefixTree, order: list[int]) -> Tensor:
    number = {index: place for place, index in enumerate(order)}
    ancestors = torch.eye(len(order), dtype=torch.bool)
    for place, index in enumerate(order):
        if (parent := tree.segments[index].parent) is not None:
            ancestors[place] |= ancestors[number[parent]]
    return ancestors


def _chosen(
    tree: PrefixTree, sample: Sample, offsets: dict[int, int], sequence: int
) -> list[Column]:
    """Predictors, targets, logprobs, advantages, weights and sequence of the chosen tokens."""
    place = np.concatenate(
        [
            offsets[index] + np.arange(len(tree.segments[index].ids))
            for index in tree.path(sample.read)
        ]
    )
    at = sample.chosen
    same = (sample.advantage, sample.weight, sequence)
    logprobs = np.asarray(sample.logprobs)[at]
    return [place[at - 1], sample.array[at], logprobs, *(np.full(len(at), value) for value in same)]
