"""The small operations between matrix products, with hand-written backward passes.

On a small model they cost as much as the products. Each one makes as few passes over its tensors
as possible and saves only what backward needs. The results equal those of the plain formulas.
"""

from typing import Any

import torch
from torch import Tensor


def lora_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
) -> Tensor:
    """x W' + bias + scale * x A' B': x [..., I], weight [O, I], a [R, I], b [O, R] -> [..., O]."""
    flat = x.reshape(-1, x.shape[-1])
    out: Tensor = _LoraLinear.apply(flat, weight, bias, a, b, scale)  # type: ignore[no-untyped-call]
    return out.view(*x.shape[:-1], -1)


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        # The LoRA is stored in fp32 and used in the dtype of x.
        low_a, low_b = a.to(x.dtype), b.to(x.dtype)
        low = x @ low_a.t()  # [N, R]
        out = torch.nn.functional.linear(x, weight, bias).addmm_(low, low_b.t(), alpha=scale)
        ctx.save_for_backward(x, weight, low, low_a, low_b)
        ctx.scale, ctx.dtype = scale, a.dtype
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, low, low_a, low_b = ctx.saved_tensors
        grad = grads[0]
        grad_low = grad @ low_b  # [N, R], not scaled yet
        grad_b = (grad.t() @ low).to(ctx.dtype).mul_(ctx.scale)
        grad_a = (grad_low.t() @ x).to(ctx.dtype).mul_(ctx.scale)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad @ weight).addmm_(grad_low, low_a, alpha=ctx.scale)
        return grad_x, None, None, grad_a, grad_b, None


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """x / rms(x) * scale over the last dimension: computed in fp32, returned in the dtype of x."""
    out: Tensor = _RmsNorm.apply(x, scale, eps)  # type: ignore[no-untyped-call]
    return out


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        wide = x.float()
        norm = torch.linalg.vecdot(wide, wide)[..., None]
        inverse = (norm / x.shape[-1]).add_(eps).rsqrt_()  # [..., 1]
        ctx.save_for_backward(x, scale, inverse)
        out: Tensor = (wide * inverse).mul_(scale).to(x.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, scale, inverse = ctx.saved_tensors
        grad = grads[0].float()
        unit = x.float() * inverse
        grad_scale = None
        if ctx.needs_input_grad[1]:
            grad_scale = (grad * unit).flatten(0, -2).sum(dim=0)
        grad = grad * scale
        along = torch.linalg.vecdot(grad, unit)[..., None] / x.shape[-1]
        return grad.sub_(unit.mul_(along)).mul_(inverse).to(x.dtype), grad_scale, None


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    out: Tensor = _SwiGlu.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_up = torch.nn.functional.silu(gate).mul_(grads[0])
        return torch.ops.aten.silu_backward(grads[0] * up, gate), grad_up


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on x [B, T, H, E]: the first half of a head pairs with its second half."""
    out: Tensor = _Rotate.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate_no_grad(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate_no_grad(grads[0], cos, sin, -1), None, None  # the inverse rotation


def rotate_no_grad(x: Tensor, cos: Tensor, sin: Tensor, direction: int = 1) -> Tensor:
    """RoPE without a gradient."""
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-direction)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:], value=direction)
    return out
