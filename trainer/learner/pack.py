"""Packs groups of token sequences into rows in which every shared prefix is computed once.

The sequences of a group form a tree: a prompt, the completions that fork from it, and their forks
in later turns. A row stores one or more trees depth first. A token attends to itself, to earlier
tokens of its segment and to the segments above. The token after a fork is predicted from the last
shared position, so nothing is stored twice or padded.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.learner.prefix_tree import Ids, PrefixTree, Sample
from trainer.policy.cpu_attention import Block, plan_blocks

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Column = NDArray[np.int64] | NDArray[np.float64]


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

    def attention_mask(self) -> "list[Block] | BlockMask | None":
        """The same mask in a form that lets the row's device skip hidden parts; None is causal."""
        if self.tokens.is_cuda:
            return None if len(self.separate) == 1 else self._flex_mask()
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


def pack(
    samples: Sequence[Sample], *, length: int | None, share: bool = True, full: bool = False
) -> list[Row]:
    """Pack `samples` into rows of at most `length` tokens. None fits the longest sample.

    With `full`, groups are divided where that saves a row: a GPU computes rows of `length` tokens
    whatever they hold. A CPU computes only the tokens, and a divided group has more of them.
    """
    longest = max(sample.inputs for sample in samples)
    if length is None:
        length = math.ceil(longest / 2048) * 2048
    assert longest <= length, "the caller drops samples that do not fit"
    bins: list[_Bin] = []
    for tree in sorted(_trees(samples, length, share), key=lambda tree: -tree.size):
        for one in bins:
            if one.size + tree.size <= length:
                one.trees.append(tree)
                one.size += tree.size
                break
        else:
            bins.append(_Bin([tree], tree.size))
    while full and (fewer := _with_one_less(bins, length)):
        bins = fewer
    return [_row(one.trees, length) for one in bins]


@dataclass
class _Bin:
    trees: list[PrefixTree]
    size: int


def _with_one_less(bins: list[_Bin], length: int) -> list[_Bin] | None:
    """Move the samples of the emptiest bin to the others, or return None if they do not fit."""
    *others, emptiest = sorted(bins, key=lambda one: -one.size)
    left = [sample for tree in emptiest.trees for sample in tree.samples]
    least = min(sample.inputs for sample in left)
    result = []
    for one in others:  # the fullest first, so that the emptiest stay so and can be next
        free = length - one.size
        if free < least:
            result.append(one)
            continue
        parts, kept = dict[int, PrefixTree](), []
        for sample in left:
            part = parts.get(sample.group) or PrefixTree()
            cost = part.cost(sample.read)
            if cost > free:
                kept.append(sample)
                continue
            part.add(sample)
            parts[sample.group] = part
            free -= cost
        left, least = kept, min((sample.inputs for sample in kept), default=length + 1)
        result.append(_Bin([*one.trees, *parts.values()], length - free))
    return None if left else result


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
