"""The segments of a packed row, each with the keys it sees: the path from the root of its tree.

The path of a segment ends with its own tokens, so causal attention from each segment to its path,
aligned at the end, is attention over the tree. It needs no mask, but a copy of the keys of a shared
prefix for each segment below it. `list of keys` is all paths, one after another.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

KEYS_PER_TOKEN = 2
"""Largest list of keys, in tokens of the padded row. Larger ones cost more than a mask does."""


class TreePaths(NamedTuple):
    """The paths of a row padded to T tokens. Sizes depend on T only, so layers compile once.

    With C = KEYS_PER_TOKEN * T. What the counts do not cover is zero.
    """

    segments: Tensor  # [T + 1] first token of each segment, and the end of the last one
    paths: Tensor  # [T + 1] first place of each segment's path in the list of keys, and its end
    tokens: Tensor  # [C] token of each place in the list of keys
    copies: Tensor  # [C] the places in the list of keys, sorted by token
    offsets: Tensor  # [T + 1] first of each token's `copies`, and the end of the last one's
    counts: Tensor
    """[2] on the CPU: numbers of segments and of keys; zeros if the list of keys is too large. The
    number of keys is T exactly if no segment has a parent."""


def tree_paths(ends: Sequence[int] | NDArray[np.int64], length: int) -> TreePaths:
    """The paths of a row with these subtree ends [T], padded to `length` by one more sequence.

    A segment and an only child that follows it have the same end, so they count as one segment.
    """
    padded = np.full(length, length)
    padded[: len(ends)] = ends
    segments = [0, *(np.flatnonzero(np.diff(padded)) + 1).tolist(), length]
    above: list[NDArray[np.int64]] = []  # tokens of the segments from the root to this one
    keys, paths = list[NDArray[np.int64]](), [0]
    for start, stop in pairwise(segments):
        while above and padded[above[-1][0]] <= start:
            above.pop()
        above.append(np.arange(start, stop))
        paths.append(paths[-1] + sum(map(len, above)))
        if paths[-1] > KEYS_PER_TOKEN * length:
            segments, keys, paths = [0], [], [0]
            break
        keys += above
    tokens = np.concatenate(keys) if keys else np.zeros(0, dtype=np.int64)
    counts = np.bincount(tokens, minlength=length)
    return TreePaths(
        _filled(segments, length + 1),
        _filled(paths, length + 1),
        _filled(tokens, KEYS_PER_TOKEN * length),
        _filled(tokens.argsort(kind="stable"), KEYS_PER_TOKEN * length),
        _filled(np.cumsum(np.append(0, counts)), length + 1),
        torch.tensor([len(segments) - 1, len(tokens)]),
    )


def _filled(values: Sequence[int] | NDArray[np.int64], size: int) -> Tensor:
    result = torch.zeros(size, dtype=torch.int32)
    result[: len(values)] = torch.as_tensor(values)
    return result
