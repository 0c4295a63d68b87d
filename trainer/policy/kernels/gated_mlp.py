"""A gated MLP with a LoRA on each of its three linear layers, in as few passes as possible."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from trainer.policy.kernels.fp8 import Fp8Weight, product, scaled_product, scales_of
from trainer.policy.kernels.lora_swiglu import lora_swiglu, lora_swiglu_backward


def gated_mlp(
    x: Tensor,  # [T, D]
    gate_up: tuple[Tensor | Fp8Weight, Tensor | None],  # the frozen weight [2F, D] and its bias
    down: tuple[Tensor | Fp8Weight, Tensor | None],  # [D, F]
    low: Tensor,  # [T, 2r] x A' of gate's LoRA, then of up's
    gate_b: Tensor,  # [r, F] B' of gate's LoRA times its scale
    up_b: Tensor,  # [r, F]
    down_a: Tensor,  # [r, F] A of down's LoRA
    down_b: Tensor,  # [D, r] B of down's LoRA times its scale
) -> Tensor:
    (first, first_bias), (second, second_bias) = gate_up, down
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        assert isinstance(first, Tensor) and isinstance(second, Tensor)
        both = linear(x, first, first_bias)
        inner, down_low, _ = lora_swiglu(both, low, gate_b, up_b, down_a)
        out = linear(inner, second, second_bias)
        return out + linear(down_low, down_b)
    weights = (*first[:4], first_bias, *second)
    found: tuple[Tensor, Tensor] = _Fp8Mlp.apply(x, *weights, low, gate_b, up_b, down_a)
    out, down_low = found
    return out + linear(down_low, down_b, second_bias)


class _Fp8Mlp(torch.autograd.Function):
    """The frozen products in fp8, and the operations between them, which round their results."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rows: Tensor,
        row_scales: Tensor,
        columns: Tensor,
        column_scales: Tensor,
        bias: Tensor | None,
        down_rows: Tensor,
        down_row_scales: Tensor,
        down_columns: Tensor,
        down_column_scales: Tensor,
        reach: Tensor,
        *loras: Tensor,
    ) -> tuple[Tensor, Tensor]:
        gate_up = product(x, rows, row_scales)
        if bias is not None:
            gate_up = gate_up + bias
        inner, down_low, peaks = lora_swiglu(gate_up, *loras, peaks=True)
        frozen = (columns, column_scales, down_columns, down_column_scales, reach)
        ctx.save_for_backward(*frozen, peaks[1], gate_up, *loras)
        return product(inner, down_rows, down_row_scales, peaks[0]), down_low

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        columns, scales, down_columns, down_scales, reach, factors, *given = ctx.saved_tensors
        grad, down_grad = (one.contiguous() for one in grads)
        inner_grad = product(grad, down_columns, down_scales)
        # An upper bound for each row of the result, which saves a pass to find its maximum. The 1.2
        # covers silu's slope (at most 1.1) and the rounding of `grad`. fp8 has enough exponents
        # that a scale a few hundred times too large costs almost nothing.
        length, down_length = (one.float().norm(dim=1) for one in (grad, down_grad))
        lora_reach = given[-1].float().norm(dim=0).amax()
        grad_scales = scales_of(1.2 * factors * (length * reach + down_length * lora_reach))
        rounded, low, loras = lora_swiglu_backward(*given, inner_grad, down_grad, grad_scales)
        x = scaled_product(rounded, grad_scales[:, None], columns, scales, grad.dtype)
        return x, *[None] * 10, low, *loras.mT.unbind()
