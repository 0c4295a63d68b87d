"""Splits the joined product of q, k and v into rotated heads, with one pass in each direction.

The compiler's backward code, a sum of slices of slices, took nine times as long as moving the
memory takes. T tokens, H query heads, K key heads, E head size.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS = 32  # per program, which handles one head of them


@triton.jit
def _place(q, k, v, t, head, queries, keys, size):
    """The address of a head in q, k or v."""
    if head < queries:
        return q + (t * queries + head) * size
    elif head < queries + keys:
        return k + (t * keys + head - queries) * size
    else:
        return v + (t * keys + head - queries - keys) * size


@triton.jit
def _turn(first, second, cos, sin, t, f, inside, size):
    c = tl.load(cos + t[:, None] * size + f[None, :], mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + t[:, None] * size + f[None, :], mask=inside, other=0.0).to(tl.float32)
    return first * c - second * s, second * c + first * s


@triton.jit
def _forward(
    base, lora, cos, sin, q, k, v, tokens, queries, keys, HALF: tl.constexpr, BT: tl.constexpr
):
    t = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    f = tl.arange(0, HALF)
    head = tl.program_id(1)
    inside = (t[:, None] < tokens) & (f[None, :] < HALF)
    at = (t[:, None] * (queries + 2 * keys) + head) * (2 * HALF) + f[None, :]
    first = tl.load(base + at, mask=inside, other=0.0).to(tl.float32)
    first += tl.load(lora + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(base + at + HALF, mask=inside, other=0.0).to(tl.float32)
    second += tl.load(lora + at + HALF, mask=inside, other=0.0).to(tl.float32)
    if head < queries + keys:
        first, second = _turn(first, second, cos, sin, t, f, inside, 2 * HALF)
    place = _place(q, k, v, t, head, queries, keys, 2 * HALF)[:, None] + f[None, :]
    tl.store(place, first.to(q.dtype.element_ty), mask=inside)
    tl.store(place + HALF, second.to(q.dtype.element_ty), mask=inside)


@triton.jit
def _backward(q, k, v, cos, sin, out, tokens, queries, keys, HALF: tl.constexpr, BT: tl.constexpr):
    t = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    f = tl.arange(0, HALF)
    head = tl.program_id(1)
    inside = (t[:, None] < tokens) & (f[None, :] < HALF)
    place = _place(q, k, v, t, head, queries, keys, 2 * HALF)[:, None] + f[None, :]
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    if head < queries + keys:  # the inverse rotation: the halves change places
        second, first = _turn(second, first, cos, sin, t, f, inside, 2 * HALF)
    at = (t[:, None] * (queries + 2 * keys) + head) * (2 * HALF) + f[None, :]
    tl.store(out + at, first.to(out.dtype.element_ty), mask=inside)
    tl.store(out + at + HALF, second.to(out.dtype.element_ty), mask=inside)


@torch.library.custom_op("art_cluster::split_heads", mutates_args=())
def split_heads(
    base: Tensor,  # [T, (H + 2K) E] the frozen weights' product
    lora: Tensor,  # [T, (H + 2K) E] the LoRAs' product, which is added here
    cos: Tensor,  # [T, E]
    sin: Tensor,  # [T, E]
    heads: int,
    kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, H, E] and k [T, K, E], both rotated, and v [T, K, E]."""
    tokens, size = cos.shape
    q = base.new_empty(tokens, heads, size)
    k, v = (base.new_empty(tokens, kv_heads, size) for _ in range(2))
    grid = (triton.cdiv(tokens, TOKENS), heads + 2 * kv_heads)
    given = (base, lora, cos, sin, q, k, v, tokens, heads, kv_heads)
    _forward[grid](*given, HALF=size // 2, BT=TOKENS)
    return q, k, v


@split_heads.register_fake
def _(
    base: Tensor, lora: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, size = cos.shape
    q, k, v = (base.new_empty(tokens, count, size) for count in (heads, kv_heads, kv_heads))
    return q, k, v


@torch.library.custom_op("art_cluster::split_heads_backward", mutates_args=())
def split_heads_backward(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    (tokens, heads, size), kv_heads = q.shape, k.shape[1]
    out = q.new_empty(tokens, (heads + 2 * kv_heads) * size)
    grid = (triton.cdiv(tokens, TOKENS), heads + 2 * kv_heads)
    given = (q, k, v, cos, sin, out, tokens, heads, kv_heads)
    _backward[grid](*given, HALF=size // 2, BT=TOKENS)
    return out


@split_heads_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    tokens, heads, size = q.shape
    return q.new_empty(tokens, (heads + 2 * k.shape[1]) * size)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, cos, sin, _, _ = inputs
    ctx.save_for_backward(cos, sin)


def _gradients(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor | None, ...]:
    grad = split_heads_backward(q.contiguous(), k.contiguous(), v.contiguous(), *ctx.saved_tensors)
    return grad, grad, None, None, None, None


split_heads.register_autograd(_gradients, setup_context=_keep)
