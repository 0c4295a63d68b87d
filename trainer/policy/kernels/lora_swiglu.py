"""The middle of a gated MLP with its LoRAs: one pass over the activations in each direction.

Between the two large products of an MLP lie parts of three LoRAs: the sums of gate's and up's, and
the first product of down's. Separately, each is a pass over [T, F], and on a 7B shape they take a
tenth of a step. Here they are small products on tiles that are already in registers. Backward
recomputes silu(gate) * up, so it is not kept.

For products in fp8, `peaks` also returns the largest magnitudes of each row, which determine its
scale, and saves a pass. With `scales`, backward writes fp8 directly.

T tokens, F inner size, r rank of the LoRAs.
"""

import functools
import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer.policy.kernels.fp8 import DTYPE as FP8
from trainer.policy.kernels.fp8 import LARGEST as LARGEST_FP8

# Tuned on an H200 between large products, which slow its clock: forward takes 0.25 ms and backward
# 0.61 ms for 8,192 tokens of a 7B shape, of which moving the activations is 0.22 and 0.37. With
# loads fewer than three tiles ahead it takes half as long again.
TILE = {"BT": 64, "BF": 64, "num_warps": 4}
AHEAD = 3
CHUNKS = {"forward": 37, "backward": 8}
LARGEST = tl.constexpr(LARGEST_FP8)
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def _sigmoid(x):
    if INTERPRETED:
        return 1 / (1 + tl.exp(-x))
    # One instruction instead of an exponential and a division, which took a quarter of the kernel.
    # Its error is at most 2^-12, an eighth of the error of rounding to bf16 near one.
    tanh = tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x * 0.5], dtype=tl.float32, is_pure=True, pack=1
    )
    return tanh * 0.5 + 0.5


@triton.jit
def _low(low, t, r, tokens, stride, offset, rank):
    """Load [BT, R] of a LoRA's low-rank activations; zero beyond its rank."""
    inside = (t[:, None] < tokens) & (r[None, :] < rank)
    return tl.load(low + t[:, None] * stride + offset + r[None, :], mask=inside, other=0.0)


@triton.jit
def _weights(weights, r, f, inner, rank, dtype: tl.constexpr):
    """Load [R, BF] of a LoRA's weights."""
    inside = (r[:, None] < rank) & (f[None, :] < inner)
    return tl.load(weights + r[:, None] * inner + f[None, :], mask=inside, other=0.0).to(dtype)


@triton.jit
def _rounded(x, inverse):
    return tl.clamp(x.to(tl.float32) * inverse, -LARGEST, LARGEST).to(tl.float8e4nv)


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
    factor = tl.zeros([BT], dtype=tl.float32)
    for tile in tl.range(TILES, num_stages=AHEAD):
        f = (tl.program_id(0) * TILES + tile) * BF + tl.arange(0, BF)
        inside = (t[:, None] < tokens) & (f[None, :] < inner)
        at = gate_up + t[:, None] * (2 * inner) + f[None, :]
        gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(at + inner, mask=inside, other=0.0).to(tl.float32)
        gate = tl.dot(gate_low, _weights(gate_b, r, f, inner, rank, dtype), gate)
        up = tl.dot(up_low, _weights(up_b, r, f, inner, rank, dtype), up)
        silu = gate * _sigmoid(gate)
        result = (silu * up).to(dtype)
        tl.store(out + t[:, None] * inner + f[None, :], result, mask=inside)
        if PEAKS:
            peak = tl.maximum(peak, tl.max(tl.abs(result.to(tl.float32)), 1))
            factor = tl.maximum(factor, tl.max(tl.maximum(tl.abs(up), tl.abs(silu)), 1))
        down_w = _weights(down_a, r, f, inner, rank, dtype)
        total = tl.dot(result, tl.trans(down_w), total)
    at = down_low + (tl.program_id(0) * tokens + t[:, None]) * rank + r[None, :]
    tl.store(at, total, mask=(t[:, None] < tokens) & (r[None, :] < rank))
    if PEAKS:
        at = peaks + tl.program_id(0) * 2 * tokens + t
        tl.store(at, peak, mask=t < tokens)
        tl.store(at + tokens, factor, mask=t < tokens)


@triton.jit
def _backward(
    gate_up, low, gate_b, up_b, down_a, grad, down_grad,
    gate_up_grad, low_grad, weight_grads, scales,
    tokens, inner, rank,
    TILES: tl.constexpr, R: tl.constexpr, FP8: tl.constexpr,
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
    if FP8:
        inverse = 1 / tl.load(scales + t, mask=t < tokens, other=1.0)[:, None]
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
        if FP8:
            tl.store(gate_up_grad + at, _rounded(gate_slope, inverse), mask=inside)
            tl.store(gate_up_grad + at + inner, _rounded(up_slope, inverse), mask=inside)
        else:
            tl.store(gate_up_grad + at, gate_slope, mask=inside)
            tl.store(gate_up_grad + at + inner, up_slope, mask=inside)
        gate_total = tl.dot(gate_slope, tl.trans(gate_w), gate_total)
        up_total = tl.dot(up_slope, tl.trans(up_w), up_total)
        block = tl.program_id(1).to(tl.int64)  # long rows hold more than 2^31 of these
        part = weight_grads + (block * 3 * inner + f[:, None]) * rank + r[None, :]
        within = (f[:, None] < inner) & (r[None, :] < rank)
        tl.store(part, tl.dot(tl.trans(gate_slope), gate_low), mask=within)
        tl.store(part + inner * rank, tl.dot(tl.trans(up_slope), up_low), mask=within)
        tl.store(part + 2 * inner * rank, tl.dot(tl.trans(result), down), mask=within)
    within = (t[:, None] < tokens) & (r[None, :] < rank)
    at = low_grad + (tl.program_id(0) * tokens + t[:, None]) * (2 * rank) + r[None, :]
    tl.store(at, gate_total, mask=within)
    tl.store(at + rank, up_total, mask=within)


def shared_memory(rank: int, ahead: int) -> int:
    """Bytes of shared memory that the backward kernel, the larger one, needs for a padded rank.

    Measured with Triton for sm80 and sm89. Hopper needs slightly less.
    """
    return 32_768 + 384 * rank + (ahead - 1) * (24_576 + 768 * rank)


@functools.cache
def _ahead(rank: int, device: torch.device) -> int:
    """Tiles to load ahead. An L4 or a 4090 has less than half of a Hopper's shared memory."""
    if device.type != "cuda":
        return AHEAD
    about = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    available = about["max_shared_mem"]
    return next((n for n in range(AHEAD, 1, -1) if shared_memory(rank, n) <= available), 1)


def _launch(kernel: Any, chunks: int, tensors: tuple[Tensor, ...], **options: int) -> None:
    """Run a kernel over all tiles."""
    tokens, (rank, inner) = len(tensors[0]), tensors[2].shape
    tiles = triton.cdiv(triton.cdiv(inner, TILE["BF"]), chunks)
    padded = max(16, triton.next_power_of_2(rank))  # a product of tiles has no shorter side
    grid = (chunks, triton.cdiv(tokens, TILE["BT"]))
    options |= {"TILES": tiles, "R": padded, "AHEAD": _ahead(padded, tensors[0].device)}
    kernel[grid](*tensors, tokens, inner, rank, **options, **TILE)


@torch.library.custom_op("art_cluster::lora_swiglu", mutates_args=())
def lora_swiglu(
    gate_up: Tensor,  # [T, 2F] the frozen weights' products, gate's then up's
    low: Tensor,  # [T, 2r] x A' of gate's LoRA, then of up's
    gate_b: Tensor,  # [r, F] B' of gate's LoRA times its scale
    up_b: Tensor,  # [r, F]
    down_a: Tensor,  # [r, F] A of down's LoRA
    peaks: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """silu(gate) * up [T, F], its product [T, r] with A' of down's LoRA, and peaks [2, T].

    The peaks are the largest magnitude of each row, and of its factors silu(gate) and up.
    """
    (tokens, _), (rank, inner) = gate_up.shape, gate_b.shape
    chunks = CHUNKS["forward"]
    out = gate_up.new_empty(tokens, inner)
    parts = gate_up.new_empty(chunks, tokens, rank, dtype=torch.float32)
    found = gate_up.new_empty(chunks, 2, tokens if peaks else 0, dtype=torch.float32)
    given = (gate_up, low, gate_b, up_b, down_a, out, parts, found)
    _launch(_forward, chunks, given, PEAKS=peaks)
    return out, parts.sum(dim=0).to(gate_up.dtype), found.amax(dim=0)


@lora_swiglu.register_fake
def _(
    gate_up: Tensor, low: Tensor, gate_b: Tensor, up_b: Tensor, down_a: Tensor,
    peaks: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    tokens, (rank, inner) = len(gate_up), gate_b.shape
    peak = gate_up.new_empty(2, tokens if peaks else 0, dtype=torch.float32)
    return gate_up.new_empty(tokens, inner), gate_up.new_empty(tokens, rank), peak


@torch.library.custom_op("art_cluster::lora_swiglu_backward", mutates_args=())
def lora_swiglu_backward(
    gate_up: Tensor, low: Tensor, gate_b: Tensor, up_b: Tensor, down_a: Tensor,
    grad: Tensor, down_grad: Tensor, scales: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of `gate_up`, of `low`, and of the three weights as [3, F, r].

    With `scales` [T] the first gradient is in fp8, each row divided by its scale.
    """
    tokens, (rank, inner) = len(gate_up), gate_b.shape
    chunks = CHUNKS["backward"]
    gate_up_grad = torch.empty_like(gate_up, dtype=None if scales is None else FP8)
    low_parts = gate_up.new_empty(chunks, tokens, 2 * rank, dtype=torch.float32)
    blocks = triton.cdiv(tokens, TILE["BT"])
    weight_parts = gate_up.new_empty(blocks, 3, inner, rank, dtype=torch.float32)
    given = (gate_up, low, gate_b, up_b, down_a, grad, down_grad)
    found = (gate_up_grad, low_parts, weight_parts)
    unused = low_parts  # a placeholder: the kernel needs some tensor
    whole = (*given, *found, unused if scales is None else scales)
    _launch(_backward, chunks, whole, FP8=scales is not None)
    return gate_up_grad, low_parts.sum(dim=0).to(low.dtype), weight_parts.sum(dim=0)


@lora_swiglu_backward.register_fake
def _(
    gate_up: Tensor, low: Tensor, gate_b: Tensor, up_b: Tensor, down_a: Tensor,
    grad: Tensor, down_grad: Tensor, scales: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    rank, inner = gate_b.shape
    weights = gate_up.new_empty(3, inner, rank, dtype=torch.float32)
    gate_up_grad = torch.empty_like(gate_up, dtype=None if scales is None else FP8)
    return gate_up_grad, torch.empty_like(low), weights


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, _ = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, grad: Tensor, down_grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    slopes = grad.contiguous(), down_grad.contiguous()
    gate_up, low, weights = lora_swiglu_backward(*ctx.saved_tensors, *slopes)
    return gate_up, low, *weights.mT.unbind(), None


lora_swiglu.register_autograd(_gradients, setup_context=_keep)
