"""The attention mask of a packed row on a GPU, built without a tensor of size [T, T].

A row stores its trees depth first, so the descendants of a segment follow it without a gap. Query q
sees key k exactly when k <= q < end[k], where end[k] is the end of the subtree of k's segment. The
smallest and the largest end of a block's keys therefore decide whether the block is empty or full.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from trainer.policy.tree_paths import TreePaths, tree_paths

CPU = torch.device("cpu")
BLOCK = 128
SHORTEST = 2048


class Lengths:
    """The lengths that rows are padded to. Each one compiles a kernel, so lengths are reused."""

    def __init__(self) -> None:
        self._used: set[int] = set()

    def fit(self, length: int) -> int:
        """Return a length of at least `length`: a used one, if it is at most twice the best."""
        best = SHORTEST
        while best < length:
            # 2048, 3072, 4096, 6144, 8192, ...: padding is at most a third
            best = best * 3 // 2 if best & (best - 1) == 0 else best * 4 // 3
        chosen = min((one for one in self._used if best <= one <= 2 * best), default=best)
        self._used.add(chosen)
        return chosen


@dataclass(frozen=True)
class TreeMask:
    """The mask of a padded row, in the forms that flex attention and FlashAttention need."""

    blocks: BlockMask
    ends: Tensor  # [T]
    paths: TreePaths

    def by_query(self) -> list[Tensor]:
        """Counts and numbers of the key blocks that each query block sees in part, then in full."""
        mask: Any = self.blocks
        return [mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices]

    def by_key(self) -> list[Tensor]:
        """The same for the query blocks that see each key block."""
        mask: Any = self.blocks
        return [mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices]


def tree_mask(
    ends: Sequence[int] | NDArray[np.int64],  # [T] end of the subtree of each token's segment
    length: int,
    *,
    device: torch.device = CPU,
) -> TreeMask:
    """Build the mask of a row padded to `length`, a multiple of BLOCK. Padding sees only padding.

    The mask is built on the CPU and sent to `device` without waiting for work running there.
    """
    padded = torch.arange(1, length + 1, dtype=torch.int32)
    padded[: len(ends)] = torch.as_tensor(ends)
    by_block = padded.view(-1, BLOCK)
    count = len(by_block)
    starts = torch.arange(count) * BLOCK  # [Q] first query of each block
    earlier = torch.ones(count, count, dtype=torch.bool).tril(-1)
    full = earlier & (by_block.amin(dim=1) >= starts[:, None] + BLOCK)  # [Q, K]
    seen = earlier & (by_block.amax(dim=1) > starts[:, None])
    partial = (seen & ~full) | torch.eye(count, dtype=torch.bool)
    device_ends = _to_device(padded, device)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < device_ends[key])

    lists = [
        _to_device(part, device)
        for blocks in (partial, full, partial.t(), full.t())
        for part in _marked(blocks)
    ]
    by_query, by_key = lists[:4], lists[4:]
    sizes = {"BLOCK_SIZE": (BLOCK, BLOCK), "mask_mod": visible}
    mask = BlockMask((length, length), *by_query, *by_key, **sizes)  # type: ignore[arg-type]
    *numbers, counts = tree_paths(ends, length)
    paths = TreePaths._make([*(_to_device(part, device) for part in numbers), counts])
    return TreeMask(mask, device_ends, paths)


def _marked(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """For each block of the first axis, the count and numbers of marked blocks of the second."""
    numbers = blocks.int().contiguous().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(dim=-1)[None, None].int(), numbers[None, None].int()


def _to_device(part: Tensor, device: torch.device) -> Tensor:
    # A copy from pageable memory would wait for all work started before it.
    return part.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else part
