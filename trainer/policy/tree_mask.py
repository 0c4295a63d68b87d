"""The mask of a packed row for flex attention: one comparison a pair, blocks found without looking.

A row lays its trees out depth first, so the descendants of a segment follow it without a gap, and
query q sees key k exactly when k <= q < end[k], where end[k] is where the subtree of k's segment
ends. Whether a block of the mask is empty or full then follows from the least and the greatest end
of its keys: nothing of size [T, T] is ever made.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

CPU = torch.device("cpu")
BLOCK = 128
SHORTEST = 2048


class Lengths:
    """The lengths rows are padded to. A kernel is compiled for each, so a known one is reused."""

    def __init__(self) -> None:
        self._known: set[int] = set()

    def fit(self, length: int) -> int:
        """A length of at least `length`: one met before, if it is at most twice the best."""
        best = SHORTEST
        while best < length:
            # 2048, 3072, 4096, 6144, 8192, ...: at most a third is padding
            best = best * 3 // 2 if best & (best - 1) == 0 else best * 4 // 3
        chosen = min((one for one in self._known if best <= one <= 2 * best), default=best)
        self._known.add(chosen)
        return chosen


@dataclass(frozen=True)
class TreeMask:
    """Who sees whom in a padded row, as each of the two kernels wants it."""

    blocks: BlockMask
    ends: Tensor  # [T]
    starts: Tensor  # [T + 1] where the sequences start and the last one ends, then zeros
    separate: Tensor
    """[2] on the CPU: how many sequences lie side by side and the longest; none if some share."""

    def by_query(self) -> list[Tensor]:
        """For each block of queries: how many blocks of keys it sees in part, which, and whole."""
        mask: Any = self.blocks
        return [mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices]

    def by_key(self) -> list[Tensor]:
        """The same for each block of keys."""
        mask: Any = self.blocks
        return [mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices]


def tree_mask(
    ends: Sequence[int] | NDArray[np.int64],  # [T] where the subtree of each token's segment ends
    length: int,
    *,
    separate: Sequence[int] = (),
    device: torch.device = CPU,
) -> TreeMask:
    """The mask of a row padded to `length`, a multiple of the block; padding sees itself alone.

    `separate` are the lengths of its sequences, where none shares anything: padding is one more.
    It is made on the CPU and sent to `device` without waiting for what is under way there.
    """
    lengths = [*separate, length - len(ends)] if separate and length > len(ends) else list(separate)
    bounds = torch.zeros(length + 1, dtype=torch.int32)
    bounds[1 : len(lengths) + 1] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
    told = torch.tensor([len(lengths), max(lengths, default=0)])
    padded = torch.arange(1, length + 1, dtype=torch.int32)
    padded[: len(ends)] = torch.as_tensor(ends)
    by_block = padded.view(-1, BLOCK)
    count = len(by_block)
    starts = torch.arange(count) * BLOCK  # [Q] first query of each block
    earlier = torch.ones(count, count, dtype=torch.bool).tril(-1)
    full = earlier & (by_block.amin(dim=1) >= starts[:, None] + BLOCK)  # [Q, K]
    seen = earlier & (by_block.amax(dim=1) > starts[:, None])
    partial = (seen & ~full) | torch.eye(count, dtype=torch.bool)
    ends_there = _sent(padded, device)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends_there[key])

    lists = [
        _sent(part, device)
        for blocks in (partial, full, partial.t(), full.t())
        for part in _listed(blocks)
    ]
    by_query, by_key = lists[:4], lists[4:]
    sizes = {"BLOCK_SIZE": (BLOCK, BLOCK), "mask_mod": visible}
    mask = BlockMask((length, length), *by_query, *by_key, **sizes)  # type: ignore[arg-type]
    return TreeMask(mask, ends_there, _sent(bounds, device), told)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """For each block of the first axis, how many of the second are marked, and their numbers."""
    numbers = blocks.int().contiguous().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(dim=-1)[None, None].int(), numbers[None, None].int()


def _sent(part: Tensor, device: torch.device) -> Tensor:
    # From pageable memory the copy would wait for all that was started before it.
    return part.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else part
