"""The mask of a packed row for flex attention: one comparison a pair, blocks found without looking.

A row lays its trees out depth first, so the descendants of a segment follow it without a gap, and
query q sees key k exactly when k <= q < end[k], where end[k] is where the subtree of k's segment
ends. Whether a block of the mask is empty or full then follows from the least and the greatest end
of its keys: nothing of size [T, T] is ever made.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

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
class Tree:
    """Who sees whom in a padded row, as each of the two kernels wants it."""

    blocks: BlockMask
    ends: Tensor  # [T]
    starts: Tensor  # [T + 1] where the sequences start and the last one ends, then zeros
    apart: Tensor
    """[2] on the CPU: how many sequences lie side by side and the longest; none if some share."""

    def by_query(self) -> list[Tensor]:
        """For each block of queries: how many blocks of keys it sees in part, which, and whole."""
        mask: Any = self.blocks
        return [mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices]

    def by_key(self) -> list[Tensor]:
        """The same for each block of keys."""
        mask: Any = self.blocks
        return [mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices]


def subtree_ends(
    segments: Tensor,  # [T] segment of each token, in the row's order
    ancestors: Tensor,  # [S, S] True where a segment may look at another, itself included
) -> Tensor:
    """[T] where the subtree of each token's segment ends."""
    ends = torch.zeros(len(ancestors), dtype=torch.long, device=segments.device)
    places = torch.arange(1, len(segments) + 1, device=segments.device)
    ends.scatter_reduce_(0, segments, places, "amax")  # [S] where each segment itself ends
    last = torch.where(ancestors, ends[:, None], 0).amax(dim=0)  # [S]
    return last[segments]


def tree_mask(ends: Tensor, length: int, *, apart: Sequence[int] = ()) -> Tree:
    """The mask of a row padded to `length`, a multiple of the block; padding sees itself alone.

    `apart` are the lengths of its sequences, where none shares anything: padding is one more.
    """
    lengths = [*apart, length - len(ends)] if apart and length > len(ends) else list(apart)
    bounds = torch.zeros(length + 1, dtype=torch.int32)
    bounds[1 : len(lengths) + 1] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
    told = torch.tensor([len(lengths), max(lengths, default=0)])
    padding = torch.arange(len(ends) + 1, length + 1, device=ends.device)
    ends = torch.cat([ends, padding]).to(torch.int32)
    by_block = ends.view(-1, BLOCK)
    count = len(by_block)
    starts = torch.arange(count, device=ends.device) * BLOCK  # [Q] first query of each block
    earlier = torch.ones(count, count, dtype=torch.bool, device=ends.device).tril(-1)
    full = earlier & (by_block.amin(dim=1) >= starts[:, None] + BLOCK)  # [Q, K]
    seen = earlier & (by_block.amax(dim=1) > starts[:, None])
    partial = (seen & ~full) | torch.eye(count, dtype=torch.bool, device=ends.device)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends[key])

    # seq_lengths is left out: torch 2.11 takes the whole blocks as the length, as it is here.
    mask: BlockMask = BlockMask.from_kv_blocks(
        *_listed(partial), *_listed(full), BLOCK_SIZE=BLOCK, mask_mod=visible
    )
    return Tree(mask, ends, bounds.to(ends.device), told)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """For each query block, how many key blocks are marked, and their numbers first."""
    numbers = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(dim=-1)[None, None].int(), numbers[None, None].int()
