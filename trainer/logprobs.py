"""Log-probabilities of chosen tokens without ever holding their logits.

The vocabulary is walked in chunks with a running maximum, as flash attention walks keys. Since a
token's loss is a scalar times its logprob, the gradient direction `W[target] - p @ W` can be
gathered on the same walk: the backward pass is one multiplication.
"""

from typing import Any

import torch
from torch import Tensor

VOCABULARY_CHUNK = 16_384


def chosen_logprobs(
    hidden: Tensor,  # [N, D]
    head: Tensor,  # [V, D]
    targets: Tensor,  # [N]
    *,
    chunk: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Logprobs [N] of `targets` (with gradient) and entropies [N] (without), both in fp32."""
    found = [
        _Logprobs.apply(hidden[at : at + chunk], head, targets[at : at + chunk])  # type: ignore[no-untyped-call]
        for at in range(0, len(targets), chunk)
    ]
    return torch.cat([pair[0] for pair in found]), torch.cat([pair[1] for pair in found])


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        count = len(targets)
        highest = hidden.new_full((count,), float("-inf"), dtype=torch.float32)
        total = torch.zeros_like(highest)  # sum of exp(logit - highest)
        weighted = torch.zeros_like(highest)  # sum of exp(logit - highest) * logit
        mean = hidden.new_zeros(hidden.shape, dtype=torch.float32)  # sum of exp(...) * W
        picked = torch.zeros_like(highest)  # the target's logit
        want_direction = ctx.needs_input_grad[0]
        for start in range(0, len(head), VOCABULARY_CHUNK):
            weights = head[start : start + VOCABULARY_CHUNK]
            logits = (hidden @ weights.t()).float()  # [N, C]
            peak = torch.maximum(highest, logits.amax(dim=-1))
            shrink = (highest - peak).exp()
            odds = (logits - peak[:, None]).exp()
            total = total * shrink + odds.sum(dim=-1)
            weighted = weighted * shrink + torch.linalg.vecdot(odds, logits)
            if want_direction:
                mean = mean * shrink[:, None] + (odds.to(hidden.dtype) @ weights)
            highest = peak
            # From the same rounded logits as the normaliser, as a sampler takes it.
            local = targets - start
            here = (local >= 0) & (local < len(weights))
            chosen = logits.gather(1, local.clamp(0, len(weights) - 1)[:, None])[:, 0]
            picked = torch.where(here, chosen, picked)
        normaliser = highest + total.log()
        direction = head[targets].float() - mean / total[:, None] if want_direction else None
        ctx.save_for_backward(direction, *_kept(ctx, hidden, head, targets, normaliser))
        entropies = normaliser - weighted / total
        ctx.mark_non_differentiable(entropies)
        return picked - normaliser, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        direction, hidden, head, targets, normaliser = ctx.saved_tensors
        grad = grads[0]
        grad_hidden = None
        if direction is not None:
            grad_hidden = (grad[:, None] * direction).to(ctx.dtype)
        grad_head = None
        if head is not None:
            # Full finetuning trains the head too: walk the vocabulary once more.
            grad_head = torch.zeros_like(head)
            for start in range(0, len(head), VOCABULARY_CHUNK):
                weights = head[start : start + VOCABULARY_CHUNK]
                slopes = -((hidden @ weights.t()).float() - normaliser[:, None]).exp()
                grad_head[start : start + VOCABULARY_CHUNK] = (slopes * grad[:, None]).to(
                    hidden.dtype
                ).t() @ hidden
            grad_head.index_add_(0, targets, (grad[:, None] * hidden.float()).to(head.dtype))
        return grad_hidden, grad_head, None


def _kept(
    ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, normaliser: Tensor
) -> tuple[Tensor | None, ...]:
    ctx.dtype = hidden.dtype
    if ctx.needs_input_grad[1]:
        return hidden, head, targets, normaliser
    return None, None, None, None
