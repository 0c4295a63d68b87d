"""Attention over a packed row on CPU, computed only between tokens that may see each other.

The row is cut into blocks of queries. A block's keys are the ranges that any of its queries sees:
the segments above it, which all its queries see in full, and its own tokens, which are masked.
Nothing is computed between sequences that do not see each other. The backward pass is written by
hand, because PyTorch's masked attention has a slow one on CPU.

T tokens, H query heads, K key heads, E head size, N queries of a block, S keys of a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

QUERIES = 256  # approximate size of a block
KEPT_CELLS = 1 << 25  # a layer with more attention weights recomputes them in the backward pass


@dataclass(frozen=True)
class Block:
    """Queries `start` to `end`, the key ranges they attend to, and the mask of the last keys."""

    start: int
    end: int
    keys: tuple[tuple[int, int], ...]
    shared: int  # number of leading keys that every query sees
    hidden: Tensor  # [N, S - shared] True where a query must not attend

    @property
    def cells(self) -> int:
        return (self.end - self.start) * sum(end - start for start, end in self.keys)

    def take(self, x: Tensor) -> Tensor:
        """Return the block's keys or values [K, S, E] from x [K, T, E]."""
        parts = [x[:, start:end] for start, end in self.keys]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def add(self, total: Tensor, part: Tensor) -> None:
        """Add the block's part [K, S, E] to `total` [K, T, E]."""
        at = 0
        for start, end in self.keys:
            total[:, start:end] += part[:, at : at + end - start]
            at += end - start


def plan_blocks(mask: Tensor, segments: Sequence[int]) -> list[Block]:
    """Split a row with `mask` [T, T] into blocks; `segments` are the lengths of its segments."""
    blocks = []
    for start, end in _cuts(segments):
        seen = mask[start:end].any(dim=0).int()
        edges = torch.diff(seen, prepend=seen.new_zeros(1), append=seen.new_zeros(1))
        starts = (edges == 1).nonzero()[:, 0].tolist()
        ends = (edges == -1).nonzero()[:, 0].tolist()
        columns = mask[start:end][:, seen.bool()]  # [N, S]
        seen_by_all = columns.all(dim=0)
        shared = int(seen_by_all.int().cumprod(0).sum())
        hidden = ~columns[:, shared:]
        blocks.append(
            Block(start, end, tuple(zip(starts, ends, strict=True)), shared, hidden.contiguous())
        )
    return blocks


def _cuts(segments: Sequence[int]) -> list[tuple[int, int]]:
    """Query ranges of about QUERIES tokens. Only a segment longer than that is cut."""
    cuts: list[tuple[int, int]] = []
    start = at = 0
    for length in segments:
        if at > start and at + length - start > QUERIES:
            cuts.append((start, at))
            start = at
        at += length
        while at - start > QUERIES:
            cuts.append((start, start + QUERIES))
            start += QUERIES
    if at > start:
        cuts.append((start, at))
    return cuts


def block_attention(queries: Tensor, keys: Tensor, values: Tensor, blocks: list[Block]) -> Tensor:
    """Softmax attention: queries [H, T, E], keys and values [K, T, E] -> [H, T, E]."""
    out: Tensor = _BlockAttention.apply(queries, keys, values, blocks)  # type: ignore[no-untyped-call]
    return out


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, blocks: list[Block]
    ) -> Tensor:
        heads, _, size = queries.shape
        kept = heads * sum(block.cells for block in blocks) <= KEPT_CELLS
        out = torch.empty_like(queries)
        kept_weights = []
        for block in blocks:
            block_queries = _scaled_queries(queries, block, len(keys))
            weights = _weights(block_queries, block.take(keys), block)
            mixed = weights @ block.take(values)  # [K, H / K * N, E]
            out[:, block.start : block.end] = mixed.view(heads, -1, size)
            if kept:
                kept_weights.append(weights)
        ctx.blocks = blocks
        ctx.save_for_backward(queries, keys, values, *kept_weights)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        queries, keys, values, *kept_weights = ctx.saved_tensors
        heads, _, size = queries.shape
        grad_queries = torch.empty_like(queries)
        # Many branches add to the keys of one prompt, so sum in fp32.
        grad_keys = torch.zeros_like(keys, dtype=torch.float32)
        grad_values = torch.zeros_like(values, dtype=torch.float32)
        for number, block in enumerate(ctx.blocks):
            block_queries = _scaled_queries(queries, block, len(keys))
            block_keys, block_values = block.take(keys), block.take(values)
            weights = (
                kept_weights[number] if kept_weights else _weights(block_queries, block_keys, block)
            )
            grad = _grouped(grads[0], block, len(keys))
            block.add(grad_values, weights.transpose(1, 2) @ grad)
            grad_scores = torch._softmax_backward_data(
                grad @ block_values.transpose(1, 2), weights, -1, weights.dtype
            )
            block.add(grad_keys, grad_scores.transpose(1, 2) @ block_queries)
            grad_scaled = (grad_scores @ block_keys).view(heads, -1, size)
            grad_queries[:, block.start : block.end] = grad_scaled * size**-0.5
        return grad_queries, grad_keys.to(keys.dtype), grad_values.to(values.dtype), None


def _grouped(x: Tensor, block: Block, kv_heads: int) -> Tensor:
    """The block's part of x [H, T, E] as [K, H / K * N, E], grouped by key head."""
    return x[:, block.start : block.end].reshape(kv_heads, -1, x.shape[-1])


def _scaled_queries(queries: Tensor, block: Block, kv_heads: int) -> Tensor:
    scaled: Tensor = _grouped(queries, block, kv_heads) * queries.shape[-1] ** -0.5
    return scaled


def _weights(queries: Tensor, keys: Tensor, block: Block) -> Tensor:
    """Attention weights [K, H / K * N, S] of a block."""
    scores: Tensor = queries @ keys.transpose(1, 2)
    kv_heads, _, seen = scores.shape
    masked = scores.view(kv_heads, -1, block.end - block.start, seen)[..., block.shared :]
    masked.masked_fill_(block.hidden, float("-inf"))
    weights: Tensor = scores.softmax(dim=-1)
    return weights
