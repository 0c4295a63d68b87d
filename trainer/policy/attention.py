"""Attention as the policy needs it: rotate-half RoPE, trees of packed sequences.

B rows, T query tokens, S key tokens, H query heads, K key heads, E head size.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from trainer.base_model.architecture import Rope
from trainer.policy.cpu_attention import Block, block_attention

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from trainer.policy.tree_mask import TreeMask

# Who attends to whom: [B, T, S] True where a query may look, None for causal; or for one packed
# row its blocks, on CPU, and its tree, on a GPU (what flex attention made of it for plain layers).
Mask: TypeAlias = "Tensor | list[Block] | BlockMask | TreeMask | None"


@dataclass(frozen=True)
class View:
    """What one forward pass sees: positions, and who attends to whom."""

    cos: Tensor  # [B, T, 1, E]
    sin: Tensor  # [B, T, 1, E]
    mask: Mask  # None: causal


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
