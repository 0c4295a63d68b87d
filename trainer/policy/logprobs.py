"""Log-probabilities of chosen tokens without ever holding their logits.

The vocabulary is walked in chunks with a running maximum, as flash attention walks keys. Since a
token's loss is a scalar times its logprob, the gradient direction `W[target] - p @ W` can be
gathered on the same walk: the backward pass is one multiplication.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

# Tokens and vocabulary of a chunk. A GPU's products are the faster the larger they are.
CHUNKS = {"cpu": (1024, 16_384), "cuda": (8192, 38_016)}
WHOLE = 128  # tokens of a tile of such a product


def chosen_logprobs(
    hidden: Tensor,  # [N, D]
    head: Tensor,  # [V, D]
    targets: Tensor,  # [N]
    *,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Logprobs [N] of `targets` (with gradient) and entropies [N] (without), both in fp32.

    `chunk` is how many tokens have logits at once; None is what suits the device.
    """
    count = len(targets)
    chunk = chunk or CHUNKS[hidden.device.type][0]
    if hidden.is_cuda:
        hidden = pad(hidden, (0, 0, 0, -count % WHOLE))
        targets = pad(targets, (0, -count % WHOLE))
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


def _finish(
    head: Tensor,
    targets: Tensor,
    highest: Tensor,
    total: Tensor,
    weighted: Tensor,
    mean: Tensor | None,
    picked: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Logprobs, entropies and normalisers [N], and the direction [N, D] of the gradient."""
    normaliser = highest + total.log()
    direction = None if mean is None else head[targets].float() - mean / total[:, None]
    return picked - normaliser, normaliser - weighted / total, normaliser, direction


def _scale(grad: Tensor, direction: Tensor, dtype: torch.dtype) -> Tensor:
    return (grad[:, None] * direction).to(dtype)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def _run(function: Callable[..., Any], count: int, *given: Any) -> Any:
    """Compiled on a GPU, once for all counts of tokens: two passes over the logits, not eight."""
    if not given[0].is_cuda:
        return function(*given)
    for tensor in given:
        if isinstance(tensor, Tensor) and len(tensor) == count:
            torch._dynamo.mark_dynamic(tensor, 0)
    return _compiled(function)(*given)


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        count = len(targets)
        highest = hidden.new_full((count,), float("-inf"), dtype=torch.float32)
        total, weighted, picked = (torch.zeros_like(highest) for _ in range(3))
        want_direction = ctx.needs_input_grad[0]
        mean = hidden.new_zeros(hidden.shape, dtype=torch.float32) if want_direction else None
        for start, weights in _parts(head):
            given = (targets - start, highest, total, weighted, mean, picked)
            highest, total, weighted, mean, picked = _run(_absorb, count, hidden, weights, *given)
        sums = (highest, total, weighted, mean, picked)
        logprobs, entropies, normaliser, direction = _run(_finish, count, head, targets, *sums)
        ctx.save_for_backward(direction, *_kept(ctx, hidden, head, targets, normaliser))
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        direction, hidden, head, targets, normaliser = ctx.saved_tensors
        grad = grads[0]
        grad_hidden = None
        if direction is not None:
            grad_hidden = _run(_scale, len(grad), grad.contiguous(), direction, ctx.dtype)
        grad_head = None
        if head is not None:
            # Full finetuning trains the head too: walk the vocabulary once more.
            grad_head = torch.zeros_like(head)
            for start, weights in _parts(head):
                slopes = -((hidden @ weights.t()).float() - normaliser[:, None]).exp()
                slopes = (slopes * grad[:, None]).to(hidden.dtype)
                grad_head[start : start + len(weights)] = slopes.t() @ hidden
            grad_head.index_add_(0, targets, (grad[:, None] * hidden.float()).to(head.dtype))
        return grad_hidden, grad_head, None


def _parts(head: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The chunks of the vocabulary, each with where it starts."""
    _, size = CHUNKS[head.device.type]
    for start in range(0, len(head), size):
        yield start, head[start : start + size]


def _kept(
    ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, normaliser: Tensor
) -> tuple[Tensor | None, ...]:
    ctx.dtype = hidden.dtype
    if ctx.needs_input_grad[1]:
        return hidden, head, targets, normaliser
    return None, None, None, None
