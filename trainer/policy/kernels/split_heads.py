"""Splits the joined product of q, k and v into rotated heads, with one pass in each direction.

The compiler's backward code, a sum of slices of slices, took nine times as long as moving the
memory takes. Where a model has an RMS norm on each head of q and k, the same pass computes it.
T tokens, H query heads, K key heads, E head size.
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
def _scale(q_scale, k_scale, head, queries):
    """The address of the norm's scale for a head of q or k."""
    if head < queries:
        return q_scale
    else:
        return k_scale


@triton.jit
def _inverse(first, second, eps, HALF: tl.constexpr):
    """One over the root mean square of each row, whose halves these are."""
    squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    return tl.rsqrt(squares / (2 * HALF) + eps)[:, None]


@triton.jit
def _unnormed(first, second, raw, scale, eps, f, inside, HALF: tl.constexpr):
    """The gradient before the norm from the one after it. Recomputes the norm of `raw`."""
    first *= tl.load(scale + f).to(tl.float32)[None, :]
    second *= tl.load(scale + HALF + f).to(tl.float32)[None, :]
    first_unit = tl.load(raw + f[None, :], mask=inside, other=0.0).to(tl.float32)
    second_unit = tl.load(raw + HALF + f[None, :], mask=inside, other=0.0).to(tl.float32)
    inverse = _inverse(first_unit, second_unit, eps, HALF)
    first_unit *= inverse
    second_unit *= inverse
    along = tl.sum(first * first_unit, axis=1) + tl.sum(second * second_unit, axis=1)
    along = along[:, None] / (2 * HALF)
    return (first - first_unit * along) * inverse, (second - second_unit * along) * inverse


@triton.jit
def _forward(
    base, lora, cos, sin, q_scale, k_scale, q, k, v, raw, tokens, queries, keys, eps,
    NORM: tl.constexpr, HALF: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
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
        if NORM:
            # Normed as it is stored, so that the backward pass norms the same values.
            first = first.to(raw.dtype.element_ty)
            second = second.to(raw.dtype.element_ty)
            kept = raw + (t[:, None] * (queries + keys) + head) * (2 * HALF) + f[None, :]
            tl.store(kept, first, mask=inside)
            tl.store(kept + HALF, second, mask=inside)
            first, second = first.to(tl.float32), second.to(tl.float32)
            inverse = _inverse(first, second, eps, HALF)
            scale = _scale(q_scale, k_scale, head, queries) + f
            first *= inverse * tl.load(scale).to(tl.float32)[None, :]
            second *= inverse * tl.load(scale + HALF).to(tl.float32)[None, :]
        first, second = _turn(first, second, cos, sin, t, f, inside, 2 * HALF)
    place = _place(q, k, v, t, head, queries, keys, 2 * HALF)[:, None] + f[None, :]
    tl.store(place, first.to(q.dtype.element_ty), mask=inside)
    tl.store(place + HALF, second.to(q.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    q, k, v, cos, sin, q_scale, k_scale, raw, out, tokens, queries, keys, eps,
    NORM: tl.constexpr, HALF: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    f = tl.arange(0, HALF)
    head = tl.program_id(1)
    inside = (t[:, None] < tokens) & (f[None, :] < HALF)
    place = _place(q, k, v, t, head, queries, keys, 2 * HALF)[:, None] + f[None, :]
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    if head < queries + keys:  # the inverse rotation: the halves change places
        second, first = _turn(second, first, cos, sin, t, f, inside, 2 * HALF)
        if NORM:
            scale = _scale(q_scale, k_scale, head, queries)
            kept = raw + (t[:, None] * (queries + keys) + head) * (2 * HALF)
            first, second = _unnormed(first, second, kept, scale, eps, f, inside, HALF)
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
    q_scale: Tensor | None = None,  # [E] of the norm on each head of q; frozen
    k_scale: Tensor | None = None,  # [E] with the other scale, or neither
    eps: float = 0.0,  # of both norms
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q [T, H, E] and k [T, K, E], both normed and rotated, v [T, K, E], and raw [T, H + K, E].

    `raw` is q and k before the norm, for the backward pass. Without a norm it is empty.
    """
    tokens, size = cos.shape
    norm = q_scale is not None
    assert norm == (k_scale is not None)
    found = _empty(base, tokens, heads, kv_heads, size, norm)
    grid = (triton.cdiv(tokens, TOKENS), heads + 2 * kv_heads)
    given = (base, lora, cos, sin, q_scale, k_scale, *found, tokens, heads, kv_heads, eps)
    _forward[grid](*given, NORM=norm, HALF=size // 2, BT=TOKENS)
    return found


def _empty(
    like: Tensor, tokens: int, heads: int, kv_heads: int, size: int, norm: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    counts = heads, kv_heads, kv_heads, heads + kv_heads if norm else 0
    q, k, v, raw = (like.new_empty(tokens, count, size) for count in counts)
    return q, k, v, raw


@split_heads.register_fake
def _(
    base: Tensor, lora: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int,
    q_scale: Tensor | None = None, k_scale: Tensor | None = None, eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    tokens, size = cos.shape
    return _empty(base, tokens, heads, kv_heads, size, q_scale is not None)


@torch.library.custom_op("art_cluster::split_heads_backward", mutates_args=())
def split_heads_backward(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor,
    q_scale: Tensor | None, k_scale: Tensor | None, raw: Tensor, eps: float,
) -> Tensor:  # fmt: skip
    """The gradient of `base`, which is also that of `lora`, from those of q, k and v."""
    (tokens, heads, size), kv_heads = q.shape, k.shape[1]
    out = q.new_empty(tokens, (heads + 2 * kv_heads) * size)
    grid = (triton.cdiv(tokens, TOKENS), heads + 2 * kv_heads)
    given = (q, k, v, cos, sin, q_scale, k_scale, raw, out, tokens, heads, kv_heads, eps)
    _backward[grid](*given, NORM=q_scale is not None, HALF=size // 2, BT=TOKENS)
    return out


@split_heads_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor,
    q_scale: Tensor | None, k_scale: Tensor | None, raw: Tensor, eps: float,
) -> Tensor:  # fmt: skip
    tokens, heads, size = q.shape
    return q.new_empty(tokens, (heads + 2 * k.shape[1]) * size)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, cos, sin, _, _, q_scale, k_scale, ctx.eps = inputs
    raw = output[3]
    ctx.save_for_backward(cos, sin, q_scale, k_scale, raw)
    ctx.mark_non_differentiable(raw)


def _gradients(ctx: Any, q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    slopes = q.contiguous(), k.contiguous(), v.contiguous()
    grad = split_heads_backward(*slopes, *ctx.saved_tensors, ctx.eps)
    return grad, grad, *[None] * 7


split_heads.register_autograd(_gradients, setup_context=_keep)
