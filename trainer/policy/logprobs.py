"""Log-probabilities of chosen tokens, computed without holding all their logits in memory.

The vocabulary is processed in chunks with a running maximum, as flash attention processes keys. A
token's loss is a scalar times its logprob, so the gradient direction `W[target] - p @ W` is
accumulated in the same loop, and the backward pass is a single multiplication.

With a head in fp8 too, `p @ W` is computed in fp8. Logits never are, because vLLM's are not.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from trainer.policy.kernels.fp8 import DTYPE as FP8
from trainer.policy.kernels.fp8 import LARGEST, quantised_rows, scaled_product

# Tokens and vocabulary entries of a chunk. On a GPU, larger products are faster.
CHUNKS = {"cpu": (1024, 16_384), "cuda": (8192, 38_016)}
TILE_TOKENS = 128  # of a GPU's product; tokens are padded to a multiple
FP8_WORDS = 16  # an fp8 product needs a multiple of these
SMALLEST_REST = -80.0  # the odds of words further below the likeliest one are zero in fp32
Columns = tuple[Tensor, Tensor]  # a chunk of the head [D, C] in fp8, and its scales [1, D]


def chosen_logprobs(
    hidden: Tensor,  # [N, D]
    head: Tensor,  # [V, D]
    targets: Tensor,  # [N]
    *,
    chunk: int | None = None,
    fp8: Sequence[Columns] | None = None,
) -> tuple[Tensor, Tensor]:
    """Logprobs [N] of `targets` (with gradient) and entropies [N] (without), both in fp32.

    `chunk` is the number of tokens whose logits are in memory at once. None suits the device.
    `fp8` is `fp8_columns` of a frozen head, for the gradient.
    """
    count = len(targets)
    chunk = chunk or CHUNKS[hidden.device.type][0]
    if hidden.is_cuda:
        hidden = pad(hidden, (0, 0, 0, -count % TILE_TOKENS))
        targets = pad(targets, (0, -count % TILE_TOKENS))
    found = [
        _Logprobs.apply(hidden[at : at + chunk], head, targets[at : at + chunk], fp8)  # type: ignore[no-untyped-call]
        for at in range(0, len(targets), chunk)
    ]
    logprobs, entropies = (torch.cat(parts)[:count] for parts in zip(*found, strict=True))
    return logprobs, entropies


def fp8_columns(head: Tensor) -> list[Columns] | None:
    """Every chunk of a frozen head in fp8, or None if its vocabulary does not fit fp8 products."""
    parts = [weights for _, weights in _parts(head)]
    if any(len(weights) % FP8_WORDS for weights in parts):
        return None
    return [quantised_rows(weights.t().contiguous()) for weights in parts]


def _update(
    hidden: Tensor,  # [N, D]
    weights: Tensor,  # [C, D] a chunk of the head
    local: Tensor,  # [N] the targets, counted from the start of the chunk
    highest: Tensor,  # [N] the highest logit so far
    total: Tensor,  # [N] sum of exp(logit - highest)
    weighted: Tensor,  # [N] sum of exp(logit - highest) * logit
    mean: Tensor | None,  # [N, D] sum of exp(logit - highest) * W
    picked: Tensor,  # [N] the target's logit
    columns: Columns | None,  # the same chunk in fp8, or None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Return the running sums after one more chunk of the vocabulary."""
    logits = (hidden @ weights.t()).float()  # [N, C]
    peak = torch.maximum(highest, logits.amax(dim=-1))
    shrink = (highest - peak).exp()
    odds = (logits - peak[:, None]).exp()
    total = total * shrink + odds.sum(dim=-1)
    weighted = weighted * shrink + torch.linalg.vecdot(odds, logits)
    if mean is not None:
        if columns is None:
            part = odds.to(hidden.dtype) @ weights
        else:
            # `_finish` adds the target. A confident token's gradient is a small difference of large
            # terms, which rounding the target's odds, or all others to zero, would swamp.
            target = torch.arange(len(weights), device=odds.device) == local[:, None]
            rest = logits.masked_fill(target, float("-inf")).amax(dim=-1)
            scales = (rest - peak).clamp(min=SMALLEST_REST).exp()[:, None] / LARGEST
            rounded = (odds.masked_fill(target, 0.0) / scales).to(FP8)
            part = scaled_product(rounded, scales, *columns, hidden.dtype)
        mean = mean * shrink[:, None] + part
    # Take the target's logit from the same rounded logits as the normaliser, as a sampler does.
    in_chunk = (local >= 0) & (local < len(weights))
    chosen = logits.gather(1, local.clamp(0, len(weights) - 1)[:, None])[:, 0]
    return peak, total, weighted, mean, torch.where(in_chunk, chosen, picked)


def _finish(
    head: Tensor,
    targets: Tensor,
    highest: Tensor,
    total: Tensor,
    weighted: Tensor,
    mean: Tensor | None,
    picked: Tensor,
    without_target: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Logprobs, entropies and normalisers [N], and the direction [N, D] of the gradient.

    `without_target` is whether `mean` leaves the target out.
    """
    normaliser = highest + total.log()
    direction = None
    if mean is not None:
        chosen = head[targets].float()
        if without_target:
            # 1 - p, from differences that are exact where p is close to 1.
            chosen = chosen * -((picked - highest) - total.log()).expm1()[:, None]
        direction = chosen - mean / total[:, None]
    return picked - normaliser, normaliser - weighted / total, normaliser, direction


def _scale(grad: Tensor, direction: Tensor, dtype: torch.dtype) -> Tensor:
    return (grad[:, None] * direction).to(dtype)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def _run(function: Callable[..., Any], count: int, *given: Any) -> Any:
    """Run `function`, compiled on a GPU: two passes over the logits, not eight.

    One compilation serves all token counts.
    """
    if not given[0].is_cuda:
        return function(*given)
    for tensor in given:
        if isinstance(tensor, Tensor) and len(tensor) == count:
            torch._dynamo.mark_dynamic(tensor, 0)
    return _compiled(function)(*given)


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, fp8: Sequence[Columns] | None
    ) -> tuple[Tensor, Tensor]:
        count = len(targets)
        highest = hidden.new_full((count,), float("-inf"), dtype=torch.float32)
        total, weighted, picked = (torch.zeros_like(highest) for _ in range(3))
        want_direction = ctx.needs_input_grad[0]
        mean = hidden.new_zeros(hidden.shape, dtype=torch.float32) if want_direction else None
        for number, (start, weights) in enumerate(_parts(head)):
            columns = fp8[number] if fp8 else None
            given = (targets - start, highest, total, weighted, mean, picked, columns)
            highest, total, weighted, mean, picked = _run(_update, count, hidden, weights, *given)
        sums = (highest, total, weighted, mean, picked)
        ends = (head, targets, *sums, fp8 is not None)
        logprobs, entropies, normaliser, direction = _run(_finish, count, *ends)
        ctx.save_for_backward(direction, *_for_head(ctx, hidden, head, targets, normaliser))
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        direction, hidden, head, targets, normaliser = ctx.saved_tensors
        grad = grads[0]
        grad_hidden = None
        if direction is not None:
            grad_hidden = _run(_scale, len(grad), grad.contiguous(), direction, ctx.dtype)
        grad_head = None
        if head is not None:
            # Full finetuning also trains the head, which needs a second loop over the vocabulary.
            grad_head = torch.zeros_like(head)
            for start, weights in _parts(head):
                slopes = -((hidden @ weights.t()).float() - normaliser[:, None]).exp()
                slopes = (slopes * grad[:, None]).to(hidden.dtype)
                grad_head[start : start + len(weights)] = slopes.t() @ hidden
            grad_head.index_add_(0, targets, (grad[:, None] * hidden.float()).to(head.dtype))
        return grad_hidden, grad_head, None, None


def _parts(head: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the start of each chunk of the vocabulary, and its weights."""
    _, size = CHUNKS[head.device.type]
    for start in range(0, len(head), size):
        yield start, head[start : start + size]


def _for_head(
    ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, normaliser: Tensor
) -> tuple[Tensor | None, ...]:
    """The tensors that the head's gradient needs, if the head is trained."""
    ctx.dtype = hidden.dtype
    if ctx.needs_input_grad[1]:
        return hidden, head, targets, normaliser
    return None, None, None, None
