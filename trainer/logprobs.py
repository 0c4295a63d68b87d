"""Log-probabilities of chosen tokens without ever holding their logits.

The vocabulary is walked in chunks with a running maximum, as flash attention walks keys. Since a
token's loss is a scalar times its logprob, the gradient direction `W[target] - p @ W` can be
gathered on the same walk: the backward pass is one multiplication.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

VOCABULARY_CHUNK = 16_384


def chosen_logprobs(
    hidden: Tensor,  # [N, D]
    head: Tensor,  # [V, D]
    targets: Tensor,  # [N]
    *,
    chunk: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Logprobs [N] of `targets` (with gradient) and entropies [N] (without), both in fp32."""
    count = len(targets)
    if hidden.is_cuda:
        # Whole chunks only: one shape is one compilation.
        hidden = pad(hidden, (0, 0, 0, -count % chunk))
        targets = pad(targets, (0, -count % chunk))
    found = [
        _Logprobs.apply(hidden[at : at + chunk], head, targets[at : at + chunk])  # type: ignore[no-untyped-call]
        for at in range(0, len(targets), chunk)
    ]
    logprobs, entropies = (torch.cat(parts)[:count] for parts in zip(*found, strict=True))
    return logprobs, entropies


def _absorb(
    hidden: Tensor,  # [N, D]
    weights: Tensor,  # [C, D] a chunk of the head
    local: Tensor,  # [N] the targets, counted from the start of the chunk
    highest: Tensor,  # [N] the highest logit so far
    total: Tensor,  # [N] sum of exp(logit - highest)
    weighted: Tensor,  # [N] sum of exp(logit - highest) * logit
    mean: Tensor | None,  # [N, D] sum of exp(logit - highest) * W
    picked: Tensor,  # [N] the target's logit
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """The running sums with one more chunk of the vocabulary."""
    logits = (hidden @ weights.t()).float()  # [N, C]
    peak = torch.maximum(highest, logits.amax(dim=-1))
    shrink = (highest - peak).exp()
    odds = (logits - peak[:, None]).exp()
    total = total * shrink + odds.sum(dim=-1)
    weighted = weighted * shrink + torch.linalg.vecdot(odds, logits)
    if mean is not None:
        mean = mean * shrink[:, None] + (odds.to(hidden.dtype) @ weights)
    # From the same rounded logits as the normaliser, as a sampler takes it.
    here = (local >= 0) & (local < len(weights))
    chosen = logits.gather(1, local.clamp(0, len(weights) - 1)[:, None])[:, 0]
    return peak, total, weighted, mean, torch.where(here, chosen, picked)


@functools.cache
def _compiled_absorb() -> Callable[..., Any]:
    """Compiled, what follows the multiplication is two passes over the logits, not eight."""
    return torch.compile(_absorb, dynamic=False)


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        count = len(targets)
        highest = hidden.new_full((count,), float("-inf"), dtype=torch.float32)
        total, weighted, picked = (torch.zeros_like(highest) for _ in range(3))
        want_direction = ctx.needs_input_grad[0]
        mean = hidden.new_zeros(hidden.shape, dtype=torch.float32) if want_direction else None
        absorb = _compiled_absorb() if hidden.is_cuda else _absorb
        for start in range(0, len(head), VOCABULARY_CHUNK):
            weights = head[start : start + VOCABULARY_CHUNK]
            highest, total, weighted, mean, picked = absorb(
                hidden, weights, targets - start, highest, total, weighted, mean, picked
            )
        normaliser = highest + total.log()
        direction = None if mean is None else head[targets].float() - mean / total[:, None]
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
