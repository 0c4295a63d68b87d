"""The two products of a LoRA, for a batch whose tokens may use several LoRAs or none.

As in vLLM's own kernels, a program takes tokens in the order of their LoRAs, so that few programs
need more than one. Those clear a buffer and add to it from several programs; here programs write
their sums side by side. T tokens, I inputs, r rank.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

SHRINK = {"BM": 16, "BK": 128, "num_warps": 2, "num_stages": 4}
EXPAND = {"BM": 32, "BN": 128, "num_warps": 4}
PROGRAMS = 256  # of the first product at least, if `PARTS` allow it
PARTS = 8  # of the inputs at most: the second product reads the sums of all


@triton.jit
def _weights(weights, slot, r, at, rank, width, inside):
    """A LoRA's A [R, BK], zero beyond its rank."""
    rows = weights + (slot * rank + r[:, None]) * width + at[None, :]
    return tl.load(rows, mask=(r[:, None] < rank) & inside[None, :], other=0.0)


@triton.jit
def _placed(mapping, order, counts, m, tokens, LORAS: tl.constexpr, COUNTS: tl.constexpr):
    """The tokens at the places `m` in the order of their LoRAs, and the LoRA of each, or -1."""
    n = tl.arange(0, COUNTS)
    # A graph may have more tokens than its batch. The rest of `order` is of an earlier batch.
    total = tl.sum(tl.load(counts + n, mask=n <= LORAS, other=0), 0)
    inside = m < tl.minimum(total, tokens)
    token = tl.load(order + m, mask=m < tokens, other=0).to(tl.int64)
    return token, tl.load(mapping + token, mask=inside, other=-1)


@triton.jit(do_not_specialize=["tokens"])
def _shrink(
    x, a, b, c, low, mapping, order, counts, tokens, width, rank, chunk, scale, x_stride,
    SLICES: tl.constexpr, LORAS: tl.constexpr, COUNTS: tl.constexpr, R: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Multiply a part of the inputs with A of each slice."""
    part = tl.program_id(1)
    m, r = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, R)
    token, lora = _placed(mapping, order, counts, m, tokens, LORAS, COUNTS)
    begin = part * chunk
    end = tl.minimum(begin + chunk, width)
    for slot in range(LORAS):
        mine = lora == slot
        if tl.sum(mine.to(tl.int32), 0) > 0:
            first = tl.zeros([BM, R], tl.float32)
            second = tl.zeros([BM, R], tl.float32)
            third = tl.zeros([BM, R], tl.float32)
            for start in range(begin, end, BK):
                at = start + tl.arange(0, BK)
                inside = at < end
                rows = x + token[:, None] * x_stride + at[None, :]
                xs = tl.load(rows, mask=mine[:, None] & inside[None, :], other=0.0)
                first = tl.dot(xs, tl.trans(_weights(a, slot, r, at, rank, width, inside)), first)
                if SLICES > 1:
                    w = _weights(b, slot, r, at, rank, width, inside)
                    second = tl.dot(xs, tl.trans(w), second)
                if SLICES > 2:
                    w = _weights(c, slot, r, at, rank, width, inside)
                    third = tl.dot(xs, tl.trans(w), third)
            kept = mine[:, None] & (r[None, :] < rank)
            place = low + (part * SLICES * tokens + m[:, None]) * rank + r[None, :]
            tl.store(place, first * scale, mask=kept)
            if SLICES > 1:
                tl.store(place + tokens * rank, second * scale, mask=kept)
            if SLICES > 2:
                tl.store(place + 2 * tokens * rank, third * scale, mask=kept)


@triton.jit(do_not_specialize=["tokens", "parts"])
def _expand(
    low, a, b, c, y, mapping, order, counts, tokens, rank, parts, y_stride,
    first_outputs, second_outputs, third_outputs, first_blocks, second_blocks,
    SLICES: tl.constexpr, LORAS: tl.constexpr, COUNTS: tl.constexpr, R: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Add up the parts, multiply them with B and add the result to y."""
    block = tl.program_id(0)
    if block < first_blocks:
        number, weights, outputs, column = 0, a, first_outputs, 0
    elif block < first_blocks + second_blocks:
        number, weights, outputs, column = 1, b, second_outputs, first_outputs
        block -= first_blocks
    else:
        number, weights, outputs, column = 2, c, third_outputs, first_outputs + second_outputs
        block -= first_blocks + second_blocks
    m, r = tl.program_id(1) * BM + tl.arange(0, BM), tl.arange(0, R)
    n = block * BN + tl.arange(0, BN)
    token, lora = _placed(mapping, order, counts, m, tokens, LORAS, COUNTS)
    for slot in range(LORAS):
        mine = lora == slot
        if tl.sum(mine.to(tl.int32), 0) > 0:
            total = tl.zeros([BM, R], tl.float32)
            kept = mine[:, None] & (r[None, :] < rank)
            for part in range(parts):
                row = (part * SLICES + number) * tokens + m[:, None]
                total += tl.load(low + row * rank + r[None, :], mask=kept, other=0.0)
            rows = weights + (slot * outputs + n[None, :]) * rank + r[:, None]
            inside = (n[None, :] < outputs) & (r[:, None] < rank)
            w = tl.load(rows, mask=inside, other=0.0)
            at = y + token[:, None] * y_stride + column + n[None, :]
            inside = mine[:, None] & (n[None, :] < outputs)
            found = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            found = tl.dot(total.to(w.dtype), w, found)
            tl.store(at, found.to(y.dtype.element_ty), mask=inside)


def add_lora(
    y: Tensor,  # [T, sum of the slices' outputs]
    x: Tensor,  # [T, I]
    a: list[Tensor],  # [LoRAs, 1, r, I] for each of at most three slices
    b: list[Tensor],  # [LoRAs, 1, outputs, r]
    mapping: Tensor,  # [T] number of each token's LoRA, or -1
    order: Tensor,  # [T] tokens by LoRA, those without one first
    counts: Tensor,  # [LoRAs + 1] how many tokens of the batch have the same LoRA, or none
    scale: float,
) -> None:
    """Add to y the product of x with the LoRA of each token."""
    (tokens, width), slices = x.shape, len(a)
    slots, rank = a[0].shape[0], a[0].shape[-2]
    blocks = triton.cdiv(tokens, SHRINK["BM"])
    parts = max(1, min(PARTS, triton.cdiv(PROGRAMS, blocks)))
    chunk = triton.cdiv(triton.cdiv(width, parts), SHRINK["BK"]) * SHRINK["BK"]
    parts = triton.cdiv(width, chunk)
    low = torch.empty(parts, slices, tokens, rank, dtype=torch.float32, device=x.device)
    shape = {"SLICES": slices, "LORAS": slots, "R": max(16, triton.next_power_of_2(rank))}
    shape["COUNTS"] = triton.next_power_of_2(slots + 1)
    three_a, three_b = ([*them, *them[-1:] * (3 - slices)] for them in (a, b))  # the rest is unused
    batch = mapping, order, counts
    _shrink[blocks, parts](
        x, *three_a, low, *batch, tokens, width, rank, chunk, scale, x.stride(0), **shape, **SHRINK
    )
    outputs = [one.shape[-2] for one in b]
    tiles = [triton.cdiv(count, EXPAND["BN"]) for count in outputs]
    outputs, before = outputs + [0] * (3 - slices), tiles + [0] * (3 - slices)
    _expand[sum(tiles), triton.cdiv(tokens, EXPAND["BM"])](
        low, *three_b, y, *batch, tokens, rank, parts, y.stride(0), *outputs, *before[:2],
        **shape, **EXPAND,
    )  # fmt: skip
