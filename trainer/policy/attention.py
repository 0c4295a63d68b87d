"""Rotate-half RoPE, and softmax attention for every kind of mask that the policy uses.

B rows, T query tokens, S key tokens, H query heads, K key heads, E head size.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trainer.base_model.architecture import Rope
from trainer.policy.cpu_attention import Block, block_attention

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from trainer.policy.tree_mask import TreeMask

# None is causal. A tensor [B, T, S] is True where a query may attend to a key. A packed row has
# blocks on CPU; on a GPU it has a tree for compiled layers and a BlockMask for plain ones.
Mask: TypeAlias = "Tensor | list[Block] | BlockMask | TreeMask | None"


@dataclass(frozen=True)
class View:
    """The positions and the attention mask of one forward pass."""

    cos: Tensor  # [B, T, 1, E]
    sin: Tensor  # [B, T, 1, E]
    mask: Mask  # None: causal


def inverse_frequencies(rope: Rope, head_dim: int, device: torch.device) -> Tensor:
    """[E / 2] angular step of each pair of dimensions, with the model's RoPE scaling."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        wavelengths = 2 * math.pi / frequencies
        smooth = (rope.original_length / wavelengths - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        # `factor` stretches long waves; short ones stay, and those in between are blended.
        smooth = smooth.clamp(0, 1)
        return (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    return frequencies


def rotations(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [B, T, 1, E] of every position. Angles are in fp32, whatever `dtype` is."""
    angles = positions[..., None].float() * frequencies  # [B, T, E / 2]
    angles = torch.cat([angles, angles], dim=-1)[:, :, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


@functools.cache
def _flex_attention() -> Callable[..., Tensor]:
    # Compiled at first use, on a GPU only: a CPU never imports the compiler.
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Tensor] = torch.compile(flex_attention)
    return compiled


def attend_causally(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention over one sequence, with kernels that need not be compiled for its length."""
    return scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Mask) -> Tensor:
    """Softmax attention: queries [B, H, T, E], keys and values [B, K, S, E] -> [B, H, T, E]."""
    if isinstance(mask, list):
        return block_attention(queries[0], keys[0], values[0], mask)[None]
    if mask is not None and not isinstance(mask, Tensor):
        out: Tensor = _flex_attention()(queries, keys, values, block_mask=mask, enable_gqa=True)
        return out
    if mask is None and queries.is_cuda:
        return attend_causally(queries, keys, values)
    batch, heads, length, size = queries.shape
    kv_heads, seen = keys.shape[1], keys.shape[2]
    # Put the H / K queries of a key head side by side, so that keys need not be repeated.
    grouped = queries.reshape(batch, kv_heads, heads // kv_heads * length, size) * size**-0.5
    scores = grouped @ keys.transpose(-1, -2)  # [B, K, H / K * T, S]
    scores = scores.view(batch, kv_heads, heads // kv_heads, length, seen)
    if mask is None:
        mask = torch.ones(1, length, seen, dtype=torch.bool, device=queries.device).tril()
    scores = scores.masked_fill(~mask[:, None, None], float("-inf"))
    weights = scores.softmax(dim=-1).view(batch, kv_heads, heads // kv_heads * length, seen)
    mixed: Tensor = weights @ values
    return mixed.view(batch, heads, length, size)
