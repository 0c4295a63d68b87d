"""Attention of requests that add one token each, over vLLM's pages of keys and values.

A program handles the query heads of one key head of a request, over all of its keys or a segment
of them. N requests, H query heads, K key heads, E head size.
"""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

SHORTEST = 1024  # tokens of a segment, unless a request has fewer
SEGMENTS = 4  # of a request at most, so that a long one does not hold the others for long
PROGRAMS = 4096  # fewer requests have more segments
# BN: keys that are read at once; registers decide how many programs a processor holds. With fewer
# than five stages Triton has one buffer for keys, so it reads while nothing is computed.
# `bench/decode_attention.py --sweep` times other sizes.
TILE = {"BN": 64, "STAGES": 3, "num_warps": 2}
FP8_TILE = {"BN": 32, "STAGES": 5, "num_warps": 1, "maxnreg": 160}
LOG2E = 1.4426950408889634
ROWS = tl.constexpr(16)  # query heads of a key head, at most: the smallest tile of a product
FP8 = (torch.uint8, torch.float8_e4m3fn)
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def _low_bytes(x):
    """The low bytes of int16 as fp8 (e4m3), in fp16: two at a time.

    Tiles of int16 spare the byte by byte reads of shared memory that a tile of fp8 would need. The
    GPU converts in two instructions; masks and shifts would take three or four.
    """
    if INTERPRETED:  # fp16 has one bit more in its exponent, so that this is 256 times too small
        return (((x & 0x80) << 8) | ((x & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return tl.inline_asm_elementwise(
        """{ .reg .b32 t; .reg .b16 pair, none; prmt.b32 t, $1, 0, 0x4420;
        mov.b32 {pair, none}, t; cvt.rn.f16x2.e4m3x2 $0, pair; }""",
        "=r,r", [x], dtype=tl.float16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _high_bytes(x):
    if INTERPRETED:
        return ((x & -0x8000) | ((x & 0x7F00) >> 1)).to(tl.float16, bitcast=True) * 256.0
    return tl.inline_asm_elementwise(
        """{ .reg .b32 t; .reg .b16 pair, none; prmt.b32 t, $1, 0, 0x4431;
        mov.b32 {pair, none}, t; cvt.rn.f16x2.e4m3x2 $0, pair; }""",
        "=r,r", [x], dtype=tl.float16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _fixed(x):
    """x, computed here: the compiler would convert queries from fp8 anew for every tile of keys."""
    if INTERPRETED:
        return x
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float16, is_pure=False, pack=2
    )


@triton.jit
def _segment(length, splits, SHORTEST: tl.constexpr):
    """The length of a request's segments."""
    return tl.maximum(tl.cdiv(tl.cdiv(length, splits), 64) * 64, SHORTEST)


@triton.jit(do_not_specialize=["splits"])
def _attend(
    q, kv, out, parts, sums, table, lengths, q_scale, k_scale, v_scale, scale, splits,
    q_stride, out_stride, table_stride, page_stride, head_stride, token_stride,
    GROUP: tl.constexpr, HEADS: tl.constexpr, E: tl.constexpr, PAGE: tl.constexpr,
    FP8: tl.constexpr, FP8_Q: tl.constexpr, SHORTEST: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # The last segments first: only long requests have them, and should not end last.
    head, seq, split = tl.program_id(0), tl.program_id(1), splits - 1 - tl.program_id(2)
    length = tl.load(lengths + seq)
    segment = _segment(length, splits, SHORTEST)
    begin = split * segment
    if (begin >= length) & (split > 0):
        return
    end = tl.minimum(length, begin + segment)
    # The halves of a head's numbers: in fp8 the even and the odd ones, which share an int16.
    HALF: tl.constexpr = E // 2
    STEP: tl.constexpr = 2 if FP8 else 1
    NEXT: tl.constexpr = 1 if FP8 else HALF
    m, e, n = tl.arange(0, ROWS), tl.arange(0, HALF), tl.arange(0, BN)
    real = m[:, None] < GROUP
    at_head = (head * GROUP + m[:, None]) * E + STEP * e[None, :]
    dtype = tl.float16 if FP8 else kv.dtype.element_ty
    first = tl.load(q + seq * q_stride + at_head, mask=real, other=0.0).to(dtype)
    second = tl.load(q + seq * q_stride + at_head + NEXT, mask=real, other=0.0).to(dtype)
    factor = scale
    if FP8:
        first, second = _fixed(first), _fixed(second)
        factor = factor * tl.load(k_scale)
    if FP8_Q:
        factor = factor * tl.load(q_scale)
    kv += head.to(tl.int64) * head_stride  # vLLM may keep all pages of a head together
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed_first = tl.zeros([ROWS, HALF], tl.float32)
    mixed_second = tl.zeros([ROWS, HALF], tl.float32)
    for start in tl.range(begin, end, BN, num_stages=STAGES):
        at = start + n
        inside = at < end
        page = tl.load(table + seq * table_stride + at // PAGE, mask=inside, other=0).to(tl.int64)
        row = kv + page * page_stride + (at % PAGE) * token_stride
        keys = row[None, :] + e[:, None]
        values = row[:, None] + e[None, :]
        if FP8:
            pairs = tl.load(keys, mask=inside[None, :], other=0)
            scores = tl.dot(first, _low_bytes(pairs))
            scores = tl.dot(second, _high_bytes(pairs), scores)
        else:
            scores = tl.dot(first, tl.load(keys, mask=inside[None, :], other=0.0))
            scores = tl.dot(second, tl.load(keys + HALF, mask=inside[None, :], other=0.0), scores)
        scores = tl.where(inside[None, :], scores * factor, float("-inf"))
        new = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new[:, None])
        fade = tl.exp2(top - new)
        total = total * fade + tl.sum(weights, 1)
        weights = weights.to(dtype)
        mixed_first *= fade[:, None]
        mixed_second *= fade[:, None]
        if FP8:
            pairs = tl.load(values + HALF, mask=inside[:, None], other=0)
            mixed_first = tl.dot(weights, _low_bytes(pairs), mixed_first)
            mixed_second = tl.dot(weights, _high_bytes(pairs), mixed_second)
        else:
            part = tl.load(values + E, mask=inside[:, None], other=0.0)
            mixed_first = tl.dot(weights, part, mixed_first)
            part = tl.load(values + E + HALF, mask=inside[:, None], other=0.0)
            mixed_second = tl.dot(weights, part, mixed_second)
        top = new
    factor = 1 / tl.maximum(total, 1e-30)  # nothing is seen by a request that only fills a graph
    if FP8:
        factor = factor * tl.load(v_scale)
    mixed_first *= factor[:, None]
    mixed_second *= factor[:, None]
    if segment >= length:
        dtype = out.dtype.element_ty
        tl.store(out + seq * out_stride + at_head, mixed_first.to(dtype), mask=real)
        tl.store(out + seq * out_stride + at_head + NEXT, mixed_second.to(dtype), mask=real)
    else:
        place = (seq * splits + split) * (HEADS * E) + at_head
        tl.store(parts + place, mixed_first, mask=real)
        tl.store(parts + place + NEXT, mixed_second, mask=real)
        at_sum = sums + (seq * splits + split) * HEADS + head * GROUP + m
        tl.store(at_sum, top + tl.log2(tl.maximum(total, 1e-30)), mask=m < GROUP)


@triton.jit(do_not_specialize=["splits"])
def _join(
    out, parts, sums, lengths, splits, out_stride,
    GROUP: tl.constexpr, HEADS: tl.constexpr, E: tl.constexpr, SHORTEST: tl.constexpr,
):  # fmt: skip
    """Join the segments of a request; a request of one segment is done."""
    head, seq = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + seq)
    segment = _segment(length, splits, SHORTEST)
    if segment >= length:
        return
    m, e = tl.arange(0, ROWS), tl.arange(0, E)
    real = m < GROUP
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, E], tl.float32)
    for split in range(0, tl.cdiv(length, segment)):
        place = (seq * splits + split) * HEADS + head * GROUP + m
        own = tl.load(sums + place, mask=real, other=0.0)
        part = tl.load(parts + place[:, None] * E + e[None, :], mask=real[:, None], other=0.0)
        new = tl.maximum(top, own)
        fade, weight = tl.exp2(top - new), tl.exp2(own - new)
        total = total * fade + weight
        mixed = mixed * fade[:, None] + part * weight[:, None]
        top = new
    place = seq * out_stride + (head * GROUP + m[:, None]) * E + e[None, :]
    tl.store(out + place, (mixed / total[:, None]).to(out.dtype.element_ty), mask=real[:, None])


def attend(
    q: Tensor,  # [N, H, E], also in fp8
    kv: Tensor,  # [pages, K, tokens, 2E]: keys, then values
    out: Tensor,  # [N, H, E]
    table: Tensor,  # [N, pages of a request]
    lengths: Tensor,  # [N]
    scale: float,
    scales: tuple[Tensor, Tensor, Tensor],  # of q, of keys and of values in fp8
    longest: int,
) -> None:
    """Write to `out` the attention of the last token of each request; `longest` bounds them."""
    count, heads, size = q.shape
    kv_heads, page = kv.shape[1:3]
    fp8 = kv.dtype in FP8
    if fp8:
        kv = kv.view(torch.int16)
    splits = max(SEGMENTS, PROGRAMS // (count * kv_heads))
    splits = min(splits, triton.cdiv(longest, SHORTEST))
    parts = sums = scales[0]  # unused, but in fp32 as below: for another type Triton compiles anew
    if splits > 1:
        parts = torch.empty(count, splits, heads, size, dtype=torch.float32, device=q.device)
        sums = torch.empty(count, splits, heads, dtype=torch.float32, device=q.device)
    given = (q, kv, out, parts, sums, table, lengths, *scales, scale * LOG2E, splits)
    strides = (q.stride(0), out.stride(0), table.stride(0), *kv.stride()[:3])
    shape = {"GROUP": heads // kv_heads, "HEADS": heads, "E": size, "SHORTEST": SHORTEST}
    options = {"FP8": fp8, "FP8_Q": q.dtype in FP8, "PAGE": page}
    tile = FP8_TILE if fp8 else TILE
    _attend[kv_heads, count, splits](*given, *strides, **shape, **options, **tile)
    if splits > 1:
        _join[kv_heads, count](out, parts, sums, lengths, splits, out.stride(0), **shape)
