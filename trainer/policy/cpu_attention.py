"""Attention over a packed row on CPU, computed only where the tree of sequences lets tokens look.

The row is cut into blocks of queries. A block's keys are the ranges that any of its queries sees:
the segments above it, which all of them see whole, and its own tokens, which are masked. Nothing
is computed between sequences that do not see each other, and backward is written out, since
PyTorch's masked attention on CPU is slow there.

T tokens, H query heads, K key heads, E head size, N queries of a block, S keys of a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

QUERIES = 256  # in a block, about
KEPT_CELLS = 1 << 25  # attention weights of a layer that are kept for backward, not recomputed


@dataclass(frozen=True)
class Block:
    """Queries start..end, the ranges of keys they look at, and what is hidden of the last ones."""

    start: int
    end: int
    keys: tuple[tuple[int, int], ...]
    shared: int  # leading keys that every query sees
    hidden: Tensor  # [N, S - shared] True where a query may not look

    @property
    def cells(self) -> int:
        return (self.end - self.start) * sum(end - start for start, end in self.keys)

    def take(self, x: Tensor) -> Tensor:
        """The block's keys or values [K, S, E] out of x [K, T, E]."""
        parts = [x[:, start:end] for start, end in self.keys]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def add(self, total: Tensor, part: Tensor) -> None:
        """Add the block's part [K, S, E] to a total [K, T, E]."""
        at = 0
        for start, end in self.keys:
            total[:, start:end] += part[:, at : at + end - start]
            at += end - start


def plan_blocks(mask: Tensor, segments: Sequence[int]) -> list[Block]:
    """Blocks of a row with `mask` [T, T], whose segments have these lengths, in order."""
    blocks = []
    for start, end in _cuts(segments):
        seen = mask[start:end].any(dim=0).int()
        edges = torch.diff(seen, prepend=seen.new_zeros(1), append=seen.new_zeros(1))
        starts = (edges == 1).nonzero()[:, 0].tolist()
        ends = (edges == -1).nonzero()[:, 0].tolist()
        columns = mask[start:end][:, seen.bool()]  # [N, S]
        everyone = columns.all(dim=0)
        shared = int(everyone.int().cumprod(0).sum())
        hidden = ~columns[:, shared:]
        blocks.append(
            Block(start, end, tuple(zip(starts, ends, strict=True)), shared, hidden.contiguous())
        )
    return blocks


def _cuts(segments: Sequence[int]) -> list[tuple[int, int]]:
    """Query ranges of about QUERIES tokens; a cut inside a segment only if it is long."""
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
    """Queries [H, T, E], keys and values [K, T, E] -> [H, T, E]."""
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
        weights = []
        for block in blocks:
            asked = _asked(queries, block, len(keys))
            looked = _weights(asked, block.take(keys), block)
            answer = looked @ block.take(values)  # [K, H / K * N, E]
            out[:, block.start : block.end] = answer.view(heads, -1, size)
            if kept:
                weights.append(looked)
        ctx.blocks = blocks
        ctx.save_for_backward(queries, keys, values, *weights)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        queries, keys, values, *weights = ctx.saved_tensors
        heads, _, size = queries.shape
        grad_queries = torch.empty_like(queries)
        # Every branch adds to the keys of its prompt: sums are taken in fp32.
        grad_keys = torch.zeros_like(keys, dtype=torch.float32)
        grad_values = torch.zeros_like(values, dtype=torch.float32)
        for number, block in enumerate(ctx.blocks):
            asked = _asked(queries, block, len(keys))
            known, told = block.take(keys), block.take(values)
            looked = weights[number] if weights else _weights(asked, known, block)
            grad = _grouped(grads[0], block, len(keys))
            block.add(grad_values, looked.transpose(1, 2) @ grad)
            slope = torch._softmax_backward_data(
                grad @ told.transpose(1, 2), looked, -1, looked.dtype
            )
            block.add(grad_keys, slope.transpose(1, 2) @ asked)
            grad_asked = (slope @ known).view(heads, -1, size)
            grad_queries[:, block.start : block.end] = grad_asked * size**-0.5
        return grad_queries, grad_keys.to(keys.dtype), grad_values.to(values.dtype), None


def _grouped(x: Tensor, block: Block, kv_heads: int) -> Tensor:
    """The block's part of x [H, T, E] as [K, H / K * N, E]: heads of one key head side by side."""
    return x[:, block.start : block.end].reshape(kv_heads, -1, x.shape[-1])


def _asked(queries: Tensor, block: Block, kv_heads: int) -> Tensor:
    scaled: Tensor = _grouped(queries, block, kv_heads) * queries.shape[-1] ** -0.5
    return scaled


def _weights(asked: Tensor, known: Tensor, block: Block) -> Tensor:
    """Attention weights [K, H / K * N, S] of a block."""
    scores: Tensor = asked @ known.transpose(1, 2)
    kv_heads, _, seen = scores.shape
    masked = scores.view(kv_heads, -1, block.end - block.start, seen)[..., block.shared :]
    masked.masked_fill_(block.hidden, float("-inf"))
    weights: Tensor = scores.softmax(dim=-1)
    return weights
