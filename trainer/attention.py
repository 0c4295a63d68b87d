"""Attention as the policy needs it: rotate-half RoPE, trees of packed sequences, a KV cache.

B rows, T query tokens, S key tokens, H query heads, K key heads, E head size.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from trainer.architecture import Architecture, Rope
from trainer.block_attention import Block, block_attention

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# Who attends to whom: [B, T, S] True where a query may look, None for causal; or for one packed
# row its blocks, on CPU, and what flex attention made of its mask, on a GPU.
Mask: TypeAlias = "Tensor | list[Block] | BlockMask | None"


class KVCache:
    """Keys and values of the tokens seen so far, for up to `rows` sequences of `length` tokens.

    A token's slot is its position, so rows may be at different lengths, join and leave at any
    time; a row is reused by simply starting again at position 0. One spare slot at the end takes
    what is written for padding (position -1).
    """

    def __init__(
        self,
        architecture: Architecture,
        rows: int,
        length: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (rows, architecture.kv_heads, length + 1, architecture.head_dim)
        self.rows = rows
        self.length = length
        self.keys = [
            torch.zeros(shape, dtype=dtype, device=device) for _ in range(architecture.layers)
        ]
        self.values = [torch.zeros_like(keys) for keys in self.keys]

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a row: to close a gap, or to share a prompt."""
        for tensors in (self.keys, self.values):
            for tensor in tensors:
                tensor[target, :, :length] = tensor[source, :, :length]


@dataclass(frozen=True)
class View:
    """What one forward pass sees: positions, who attends to whom, and the cache if any."""

    cos: Tensor  # [B, T, 1, E]
    sin: Tensor  # [B, T, 1, E]
    mask: Mask  # None: causal
    cache: KVCache | None = None
    rows: Tensor | None = None  # [B] rows of the cache; None: the first B
    positions: Tensor | None = None  # [B, T] slots to write, only with a cache
    seen: int = 0  # slots of the cache that hold anything, this pass included


def inverse_frequencies(rope: Rope, head_dim: int, device: torch.device) -> Tensor:
    """[E / 2] angular step of each pair of dimensions, scaled as the model was trained."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        wavelengths = 2 * math.pi / frequencies
        smooth = (rope.original_length / wavelengths - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        # Long waves are stretched by `factor`, short ones kept, those between blended.
        smooth = smooth.clamp(0, 1)
        return (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    return frequencies


def rotations(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [B, T, 1, E] of every position; angles in fp32, whatever the model's dtype."""
    angles = positions[..., None].float() * frequencies  # [B, T, E / 2]
    angles = torch.cat([angles, angles], dim=-1)[:, :, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def cached(
    cache: KVCache, layer: int, view: View, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Write keys and values [B, T, K, E] to the cache; return all that is seen, [B, K, S, E]."""
    assert view.positions is not None
    batch = keys.shape[0]
    rows = view.rows
    if rows is None:
        rows = torch.arange(batch, device=keys.device)
    found = []
    for store, new in ((cache.keys[layer], keys), (cache.values[layer], values)):
        store[rows[:, None], :, view.positions] = new
        kept = store[:batch] if view.rows is None else store[rows]
        found.append(kept[:, :, : view.seen])
    return found[0], found[1]


@functools.cache
def _flex_attention() -> Callable[..., Tensor]:
    # Compiled when first used, on a GPU only: elsewhere the compiler is not even imported.
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Tensor] = torch.compile(flex_attention)
    return compiled


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Mask) -> Tensor:
    """Softmax attention: queries [B, H, T, E], keys and values [B, K, S, E] -> [B, H, T, E]."""
    if isinstance(mask, list):
        return block_attention(queries[0], keys[0], values[0], mask)[None]
    if mask is not None and not isinstance(mask, Tensor):
        out: Tensor = _flex_attention()(queries, keys, values, block_mask=mask, enable_gqa=True)
        return out
    batch, heads, length, size = queries.shape
    kv_heads, seen = keys.shape[1], keys.shape[2]
    # The H / K queries of a key head are laid side by side, so that keys are never repeated.
    grouped = queries.reshape(batch, kv_heads, heads // kv_heads * length, size) * size**-0.5
    scores = grouped @ keys.transpose(-1, -2)  # [B, K, H / K * T, S]
    scores = scores.view(batch, kv_heads, heads // kv_heads, length, seen)
    if mask is None:
        mask = torch.ones(1, length, seen, dtype=torch.bool, device=queries.device).tril()
    scores = scores.masked_fill(~mask[:, None, None], float("-inf"))
    weights = scores.softmax(dim=-1).view(batch, kv_heads, heads // kv_heads * length, seen)
    mixed: Tensor = weights @ values
    return mixed.view(batch, heads, length, size)
