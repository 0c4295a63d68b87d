"""Products with frozen weights in fp8, with one scale per token and one per output.

They match vLLM's `fp8_per_channel`, so that learner and engine round alike. Weights are quantised
once, for the forward and the backward product. Activations and gradients are quantised on the fly.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
SMALLEST_SCALE = 1.0 / (LARGEST * 512)  # vLLM's bound: a row of zeros divides by it


class Fp8Weight(NamedTuple):
    """A frozen weight [O, I], quantised by rows for forward and by columns for backward."""

    rows: Tensor  # [O, I]
    row_scales: Tensor  # [1, O]
    columns: Tensor  # [I, O]
    column_scales: Tensor  # [1, I]
    reach: Tensor  # [] the largest norm of a column: bounds how much a row of gradients grows


def quantise(x: Tensor, peaks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [N, K] in fp8, and each row's scale [N, 1]. `peaks` [N] are the rows' maxima, if known."""
    largest = x.abs().amax(dim=-1).float() if peaks is None else peaks
    scales = scales_of(largest)[:, None]
    return (x.float() / scales).clamp(-LARGEST, LARGEST).to(DTYPE), scales


def scales_of(peaks: Tensor) -> Tensor:
    """The scales of rows whose largest magnitudes are `peaks`."""
    return (peaks / LARGEST).clamp(min=SMALLEST_SCALE)


def quantised_weight(weight: Tensor) -> Fp8Weight:
    reach = weight.float().norm(dim=0).amax()
    return Fp8Weight(*quantised_rows(weight), *quantised_rows(weight.t().contiguous()), reach)


def quantised_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight [O, I] in fp8, and its scales [1, O]."""
    rows, scales = quantise(weight)
    return rows, scales.t().contiguous()


def fp8_linear(x: Tensor, weight: Fp8Weight) -> Tensor:
    """Multiply x [..., I] with a frozen weight -> [..., O]."""
    flat = x.reshape(-1, x.shape[-1])
    out: Tensor = _Fp8Linear.apply(flat, *weight[:4])
    return out.view(*x.shape[:-1], -1)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rows: Tensor,
        row_scales: Tensor,
        columns: Tensor,
        column_scales: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(columns, column_scales)
        return product(x, rows, row_scales)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return product(grads[0], *ctx.saved_tensors), None, None, None, None


def product(x: Tensor, weight: Tensor, scales: Tensor, peaks: Tensor | None = None) -> Tensor:
    """Quantise x [N, K] and multiply it with an fp8 weight [O, K] and its scales [1, O]."""
    quantised, x_scales = quantise(x, peaks)
    return scaled_product(quantised, x_scales, weight, scales, x.dtype)


def scaled_product(
    x: Tensor,  # [N, K] in fp8
    x_scales: Tensor,  # [N, 1] its scales
    weight: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    return torch._scaled_mm(
        x, weight.t(), scale_a=x_scales, scale_b=scales, out_dtype=dtype, use_fast_accum=True
    )
