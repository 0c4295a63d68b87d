"""The middle of a gated MLP with its LoRAs, in one pass over the activations each way.

Between the two large products of an MLP lie the ends of three LoRAs: the sums of gate's and up's,
and the first product of down's. Each is a pass over [T, F] on its own, and on a 7B shape they cost
a tenth of a step. Here they are small products on tiles that are in registers anyway. Backward
computes silu(gate) * up again, so it is not kept.

With `peaks` each direction also tells the largest magnitude of each of its rows, which a product in
fp8 scales it by: it would be another pass.

T tokens, F inner size, r rank of the LoRAs.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Found on an H200 by trying: 0.28 and 0.67 ms for 8,192 tokens of a 7B shape, of which moving the
# activations alone is 0.22 and 0.37. Loads that are not three tiles ahead cost half as much again.
FORWARD = {"BT": 64, "BF": 64, "AHEAD": 3, "num_warps": 4}
BACKWARD = {"BT": 128, "BF": 64, "AHEAD": 3, "num_warps": 8}
CHUNKS = 37


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _low(low, t, r, tokens, stride, offset, rank):
    """[BT, R] of a LoRA's low side; zero beyond its rank."""
    inside = (t[:, None] < tokens) & (r[None, :] < rank)
    return tl.load(low + t[:, None] * stride + offset + r[None, :], mask=inside, other=0.0)


@triton.jit
def _weights(weights, r, f, inner, rank, dtype: tl.constexpr):
    """[R, BF] of a LoRA's weights."""
    inside = (r[:, None] < rank) & (f[None, :] < inner)
    return tl.load(weights + r[:, None] * inner + f[None, :], mask=inside, other=0.0).to(dtype)


@triton.jit
def _forward(
    gate_up, low, gate_b, up_b, down_a, out, down_low, peaks,
    tokens, inner, rank,
    TILES: tl.constexpr, R: tl.constexpr, PEAKS: tl.constexpr,
    BT: tl.constexpr, BF: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(1) * BT + tl.arange(0, BT)).to(tl.int64)
    r = tl.arange(0, R)
    dtype = out.dtype.element_ty
    gate_low = _low(low, t, r, tokens, 2 * rank, 0, rank)
    up_low = _low(low, t, r, tokens, 2 * rank, rank, rank)
    total = tl.zeros([BT, R], dtype=tl.float32)
    peak = tl.zeros([BT], dtype=tl.float32)
    for tile in tl.range(TILES, num_stages=AHEAD):
        f = (tl.program_id(0) * TILES + tile) * BF + tl.arange(0, BF)
        inside = (t[:, None] < tokens) & (f[None, :] < inner)
        at = gate_up + t[:, None] * (2 * inner) + f[None, :]
        gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(at + inner, mask=inside, other=0.0).to(tl.float32)
        gate = tl.dot(gate_low, _weights(gate_b, r, f, inner, rank, dtype), gate)
        up = tl.dot(up_low, _weights(up_b, r, f, inner, rank, dtype), up)
        result = (gate * _sigmoid(gate) * up).to(dtype)
        tl.store(out + t[:, None] * inner + f[None, :], result, mask=inside)
        if PEAKS:
            peak = tl.maximum(peak, tl.max(tl.abs(result.to(tl.float32)), 1))
        down_w = _weights(down_a, r, f, inner, rank, dtype)
        total = tl.dot(result, tl.trans(down_w), total)
    at = down_low + (tl.program_id(0) * tokens + t[:, None]) * rank + r[None, :]
    tl.store(at, total, mask=(t[:, None] < tokens) & (r[None, :] < rank))
    if PEAKS:
        tl.store(peaks + tl.program_id(0) * tokens + t, peak, mask=t < tokens)


@triton.jit
def _backward(
    gate_up, low, gate_b, up_b, down_a, grad, down_grad,
    gate_up_grad, low_grad, weight_grads, peaks,
    tokens, inner, rank,
    TILES: tl.constexpr, R: tl.constexpr, PEAKS: tl.constexpr,
    BT: tl.constexpr, BF: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(1) * BT + tl.arange(0, BT)).to(tl.int64)
    r = tl.arange(0, R)
    dtype = gate_up.dtype.element_ty
    gate_low = _low(low, t, r, tokens, 2 * rank, 0, rank)
    up_low = _low(low, t, r, tokens, 2 * rank, rank, rank)
    down = _low(down_grad, t, r, tokens, rank, 0, rank)
    gate_total = tl.zeros([BT, R], dtype=tl.float32)
    up_total = tl.zeros([BT, R], dtype=tl.float32)
    peak = tl.zeros([BT], dtype=tl.float32)
    for tile in tl.range(TILES, num_stages=AHEAD):
        f = (tl.program_id(0) * TILES + tile) * BF + tl.arange(0, BF)
        inside = (t[:, None] < tokens) & (f[None, :] < inner)
        at = t[:, None] * (2 * inner) + f[None, :]
        gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + at + inner, mask=inside, other=0.0).to(tl.float32)
        slope = tl.load(grad + t[:, None] * inner + f[None, :], mask=inside, other=0.0)
        slope = slope.to(tl.float32)
        gate_w = _weights(gate_b, r, f, inner, rank, dtype)
        up_w = _weights(up_b, r, f, inner, rank, dtype)
        gate = tl.dot(gate_low, gate_w, gate)
        up = tl.dot(up_low, up_w, up)
        slope = tl.dot(down, _weights(down_a, r, f, inner, rank, dtype), slope)
        share = _sigmoid(gate)
        silu = gate * share
        result = (silu * up).to(dtype)
        up_slope = (slope * silu).to(dtype)
        gate_slope = (slope * up * (share + silu * (1 - share))).to(dtype)
        tl.store(gate_up_grad + at, gate_slope, mask=inside)
        tl.store(gate_up_grad + at + inner, up_slope, mask=inside)
        if PEAKS:
            greater = tl.maximum(tl.abs(gate_slope.to(tl.float32)), tl.abs(up_slope.to(tl.float32)))
            peak = tl.maximum(peak, tl.max(greater, 1))
        gate_total = tl.dot(gate_slope, tl.trans(gate_w), gate_total)
        up_total = tl.dot(up_slope, tl.trans(up_w), up_total)
        part = weight_grads + (tl.program_id(1) * 3 * rank + r[:, None]) * inner + f[None, :]
        within = (r[:, None] < rank) & (f[None, :] < inner)
        tl.store(part, tl.dot(tl.trans(gate_low), gate_slope), mask=within)
        tl.store(part + rank * inner, tl.dot(tl.trans(up_low), up_slope), mask=within)
        tl.store(part + 2 * rank * inner, tl.dot(tl.trans(down), result), mask=within)
    within = (t[:, None] < tokens) & (r[None, :] < rank)
    at = low_grad + (tl.program_id(0) * tokens + t[:, None]) * (2 * rank) + r[None, :]
    tl.store(at, gate_total, mask=within)
    tl.store(at + rank, up_total, mask=within)
    if PEAKS:
        tl.store(peaks + tl.program_id(0) * tokens + t, peak, mask=t < tokens)


def _launch(
    kernel: Any, tensors: tuple[Tensor, ...], inner: int, options: dict[str, int], *, peaks: bool
) -> Tensor:
    """Run a kernel over all tiles and return the peaks of its rows, none if not asked for."""
    tokens, rank = len(tensors[0]), len(tensors[2])
    tiles = triton.cdiv(triton.cdiv(inner, options["BF"]), CHUNKS)
    padded = max(16, triton.next_power_of_2(rank))  # a product of tiles has no shorter side
    grid = (CHUNKS, triton.cdiv(tokens, options["BT"]))
    found = tensors[0].new_empty(CHUNKS, tokens if peaks else 0, dtype=torch.float32)
    sizes = {"TILES": tiles, "R": padded, "PEAKS": peaks}
    kernel[grid](*tensors, found, tokens, inner, rank, **sizes, **options)
    return found.amax(dim=0)


@torch.library.custom_op("art_cluster::lora_swiglu", mutates_args=())
def lora_swiglu(
    gate_up: Tensor,  # [T, 2F] the frozen weights' products, gate's beside up's
    low: Tensor,  # [T, 2r] x A' of gate's LoRA beside that of up's
    gate_b: Tensor,  # [r, F] B' of gate's LoRA times its scale
    up_b: Tensor,  # [r, F]
    down_a: Tensor,  # [r, F] A of down's LoRA
    peaks: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """silu(gate) * up [T, F], its product [T, r] with A' of down's LoRA, and its peaks [T]."""
    (tokens, _), (rank, inner) = gate_up.shape, gate_b.shape
    out = gate_up.new_empty(tokens, inner)
    parts = gate_up.new_empty(CHUNKS, tokens, rank, dtype=torch.float32)
    given = (gate_up, low, gate_b, up_b, down_a, out, parts)
    peak = _launch(_forward, given, inner, FORWARD, peaks=peaks)
    return out, parts.sum(dim=0).to(gate_up.dtype), peak


@lora_swiglu.register_fake
def _(
    gate_up: Tensor, low: Tensor, gate_b: Tensor, up_b: Tensor, down_a: Tensor,
    peaks: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    tokens, (rank, inner) = len(gate_up), gate_b.shape
    peak = gate_up.new_empty(tokens if peaks else 0, dtype=torch.float32)
    return gate_up.new_empty(tokens, inner), gate_up.new_empty(tokens, rank), peak


@torch.library.custom_op("art_cluster::lora_swiglu_backward", mutates_args=())
def lora_swiglu_backward(
    gate_up: Tensor, low: Tensor, gate_b: Tensor, up_b: Tensor, down_a: Tensor,
    grad: Tensor, down_grad: Tensor, peaks: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of `gate_up`, of `low`, of the three weights as [3r, F], and the first's peaks."""
    tokens, (rank, inner) = len(gate_up), gate_b.shape
    gate_up_grad = torch.empty_like(gate_up)
    low_parts = gate_up.new_empty(CHUNKS, tokens, 2 * rank, dtype=torch.float32)
    blocks = triton.cdiv(tokens, BACKWARD["BT"])
    weight_parts = gate_up.new_empty(blocks, 3 * rank, inner, dtype=torch.float32)
    given = (gate_up, low, gate_b, up_b, down_a, grad, down_grad)
    found = (gate_up_grad, low_parts, weight_parts)
    peak = _launch(_backward, (*given, *found), inner, BACKWARD, peaks=peaks)
    return gate_up_grad, low_parts.sum(dim=0).to(low.dtype), weight_parts.sum(dim=0), peak


@lora_swiglu_backward.register_fake
def _(
    gate_up: Tensor, low: Tensor, gate_b: Tensor, up_b: Tensor, down_a: Tensor,
    grad: Tensor, down_grad: Tensor, peaks: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    rank, inner = gate_b.shape
    weights = gate_up.new_empty(3 * rank, inner, dtype=torch.float32)
    peak = gate_up.new_empty(len(gate_up) if peaks else 0, dtype=torch.float32)
    return torch.empty_like(gate_up), torch.empty_like(low), weights, peak


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, _ = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, grad: Tensor, down_grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    rank = len(ctx.saved_tensors[2])
    gate_up, low, weights, _ = lora_swiglu_backward(
        *ctx.saved_tensors, grad.contiguous(), down_grad.contiguous()
    )
    return gate_up, low, *weights.split(rank), None


lora_swiglu.register_autograd(_gradients, setup_context=_keep)
