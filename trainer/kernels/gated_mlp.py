"""A gated MLP with LoRAs on all three of its linear layers, as few passes as it can be."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from trainer.kernels.fp8 import Fp8Weight, fp8_linear, product
from trainer.kernels.lora_swiglu import lora_swiglu, lora_swiglu_backward


def gated_mlp(
    x: Tensor,  # [T, D]
    gate_up: tuple[Tensor | Fp8Weight, Tensor | None],  # the frozen weight [2F, D] and its bias
    down: tuple[Tensor | Fp8Weight, Tensor | None],  # [D, F]
    low: Tensor,  # [T, 2r] x A' of gate's LoRA beside that of up's
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
    inner, down_low, peaks = _Fp8Middle.apply(x, *first, first_bias, low, gate_b, up_b, down_a)
    return fp8_linear(inner, second, peaks) + linear(down_low, down_b, second_bias)


class _Fp8Middle(torch.autograd.Function):
    """The first product in fp8 and what follows, which tells the peaks of what it gives back."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rows: Tensor,
        row_scales: Tensor,
        columns: Tensor,
        column_scales: Tensor,
        bias: Tensor | None,
        *loras: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        gate_up = product(x, rows, row_scales)
        if bias is not None:
            gate_up = gate_up + bias
        inner, down_low, peaks = lora_swiglu(gate_up, *loras, peaks=True)
        ctx.save_for_backward(columns, column_scales, gate_up, *loras)
        ctx.mark_non_differentiable(peaks)
        return inner, down_low, peaks

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        columns, scales, *given = ctx.saved_tensors
        grad, low, weights, peaks = lora_swiglu_backward(
            *given, grads[0].contiguous(), grads[1].contiguous(), peaks=True
        )
        x = product(grad, columns, scales, peaks)
        return x, None, None, None, None, None, low, *weights.split(len(given[2]))
