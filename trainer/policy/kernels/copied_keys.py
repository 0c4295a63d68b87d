"""Copies keys and values to all paths of a tree that they are on, and sums the copies' gradients.

See `policy.tree_paths`. The sums are in fp32 and in a fixed order, without atomic additions. Most
tokens have one copy, so this takes about as long as moving the memory. T tokens, X copies, K key
heads, E head size.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _copy(keys, values, to_keys, to_values, tokens, width, WIDTH: tl.constexpr):
    """One program makes one copy."""
    place = tl.program_id(0).to(tl.int64)
    f = tl.arange(0, WIDTH)
    source = tl.load(tokens + place).to(tl.int64) * width + f
    target = place * width + f
    tl.store(to_keys + target, tl.load(keys + source, mask=f < width), mask=f < width)
    tl.store(to_values + target, tl.load(values + source, mask=f < width), mask=f < width)


@triton.jit
def _sum(keys, values, to_keys, to_values, copies, offsets, width, WIDTH: tl.constexpr):
    """One program sums all copies of one token."""
    token = tl.program_id(0).to(tl.int64)
    f = tl.arange(0, WIDTH)
    key_sum = tl.zeros([WIDTH], dtype=tl.float32)
    value_sum = tl.zeros([WIDTH], dtype=tl.float32)
    for at in range(tl.load(offsets + token), tl.load(offsets + token + 1)):
        source = tl.load(copies + at).to(tl.int64) * width + f
        key_sum += tl.load(keys + source, mask=f < width, other=0.0).to(tl.float32)
        value_sum += tl.load(values + source, mask=f < width, other=0.0).to(tl.float32)
    target = token * width + f
    tl.store(to_keys + target, key_sum.to(to_keys.dtype.element_ty), mask=f < width)
    tl.store(to_values + target, value_sum.to(to_values.dtype.element_ty), mask=f < width)


def copied(
    keys: Tensor,  # [T, K, E]
    values: Tensor,  # [T, K, E]
    tokens: Tensor,  # [X] the token of each copy
) -> tuple[Tensor, Tensor]:
    """Copies [X, K, E] of keys and values."""
    return _run(_copy, keys, values, len(tokens), tokens)


def summed(
    keys: Tensor,  # [X, K, E]
    values: Tensor,  # [X, K, E]
    copies: Tensor,  # [X] the copies, sorted by their tokens
    offsets: Tensor,  # [T + 1] first of each token's `copies`, and the end of the last one's
) -> tuple[Tensor, Tensor]:
    """Sums [T, K, E] over the copies of each token."""
    return _run(_sum, keys, values, len(offsets) - 1, copies, offsets)


def _run(
    kernel: Any, keys: Tensor, values: Tensor, rows: int, *numbers: Tensor
) -> tuple[Tensor, Tensor]:
    given = (keys.contiguous(), values.contiguous())
    heads, size = keys.shape[1:]
    width = heads * size
    found = (keys.new_empty(rows, heads, size), values.new_empty(rows, heads, size))
    kernel[(rows,)](*given, *found, *numbers, width, WIDTH=triton.next_power_of_2(width))
    return found
