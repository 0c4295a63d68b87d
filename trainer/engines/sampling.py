"""Choosing the next token of every row of a batch. Pure functions over logits [B, V]."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 256


@dataclass(frozen=True)
class Sampling:
    """How one row is sampled."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Keep so many of the likeliest tokens; 0 keeps all."""


def choose(
    logits: Tensor,  # [B, V]
    samplings: Sequence[Sampling],  # one a row
    uniforms: Sequence[float],  # one a row, in [0, 1)
) -> tuple[list[int], list[float]]:
    """The chosen token of each row, and its log-probability under the untempered policy.

    The log-probability is what the learner computes for the same token, so it is taken before
    temperature, top-p and top-k.
    """
    logits = logits.float()
    temperatures = torch.tensor([max(s.temperature, 1e-6) for s in samplings], device=logits.device)
    probabilities = logits.softmax(dim=-1)
    tempered = probabilities
    if bool((temperatures != 1).any()):
        tempered = (logits / temperatures[:, None]).softmax(dim=-1)
    if any(s.top_k or s.top_p < 1 for s in samplings):
        tempered = _keep_likeliest(tempered, samplings)
    chosen = _drawn(tempered, torch.tensor(uniforms, device=logits.device))
    greedy = torch.tensor([s.temperature == 0 for s in samplings], device=logits.device)
    if bool(greedy.any()):
        chosen = torch.where(greedy, logits.argmax(dim=-1), chosen)
    logprobs = probabilities.gather(1, chosen[:, None])[:, 0].log()
    # -inf cannot be sent as JSON, and a token that was drawn has some probability.
    return chosen.tolist(), logprobs.clamp(min=-9999.0).tolist()


def _drawn(weights: Tensor, uniforms: Tensor) -> Tensor:
    """A column for each row of `weights` [B, V], by the inverse of the cumulative distribution.

    First a block of columns, then a column in it: a sum over all of them is quick on a CPU, a
    running sum is not, and `multinomial` draws serially.
    """
    batch, width = weights.shape
    blocks = functional.pad(weights, (0, -width % BLOCK)).view(batch, -1, BLOCK)
    running = blocks.sum(dim=-1).cumsum(dim=-1)  # [B, V / BLOCK]
    draws = uniforms[:, None] * running[:, -1:]
    block = _reached(running, draws)
    before = functional.pad(running, (1, 0)).gather(1, block)
    inside = blocks[torch.arange(batch, device=block.device), block[:, 0]].cumsum(dim=-1)
    return (block * BLOCK + _reached(inside, draws - before))[:, 0]


def _reached(running: Tensor, draws: Tensor) -> Tensor:
    """Where the running sums [B, N] first pass the draws [B, 1]; rounding leads none past all."""
    last = running[:, -1:]
    draws = draws.clamp(min=0).minimum(last.nextafter(torch.zeros_like(last)))
    return torch.searchsorted(running, draws, right=True)


def _keep_likeliest(probabilities: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """With zeros for what top-k and top-p leave out; rows that ask for neither cost nothing."""
    probabilities = probabilities.clone()
    for row, sampling in enumerate(samplings):
        if sampling.top_k:
            kept = probabilities[row].topk(min(sampling.top_k, probabilities.shape[1]))
            probabilities[row].zero_().scatter_(0, kept.indices, kept.values)
        if sampling.top_p < 1:
            values, order = probabilities[row].sort(descending=True)
            # A token stays while those before it have not filled top_p: the first always.
            left_out = values.cumsum(0) - values >= sampling.top_p * values.sum()
            left_out[0] = False  # though a top_p that rounds to nothing says otherwise
            values[left_out] = 0
            probabilities[row].scatter_(0, order, values)
    return probabilities
