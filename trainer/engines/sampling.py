"""Choosing the next token of every row of a batch. Pure functions over logits [B, V]."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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
    tempered = logits if bool((temperatures == 1).all()) else logits / temperatures[:, None]
    probabilities = tempered.softmax(dim=-1)
    _keep_likeliest(probabilities, samplings)
    # The inverse of the cumulative distribution: `multinomial` draws serially on a CPU.
    cumulative = probabilities.cumsum(dim=-1)
    draws = torch.tensor(uniforms, device=logits.device)[:, None] * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, draws, right=True)[:, 0]
    chosen = chosen.clamp(max=logits.shape[1] - 1)
    greedy = torch.tensor([s.temperature == 0 for s in samplings], device=logits.device)
    if bool(greedy.any()):
        chosen = torch.where(greedy, logits.argmax(dim=-1), chosen)
    logprobs = logits.gather(1, chosen[:, None])[:, 0] - logits.logsumexp(dim=-1)
    # -inf cannot be sent as JSON, and a token that was drawn has some probability.
    return chosen.tolist(), logprobs.clamp(min=-9999.0).tolist()


def _keep_likeliest(probabilities: Tensor, samplings: Sequence[Sampling]) -> None:
    """Zero, in place, what top-k and top-p leave out; rows that ask for neither cost nothing."""
    for row, sampling in enumerate(samplings):
        if sampling.top_k:
            kept = probabilities[row].topk(min(sampling.top_k, probabilities.shape[1]))
            probabilities[row].zero_().scatter_(0, kept.indices, kept.values)
        if sampling.top_p < 1:
            values, order = probabilities[row].sort(descending=True)
            # A token stays while those before it have not filled top_p: the first always stays.
            values[values.cumsum(0) - values >= sampling.top_p * values.sum()] = 0
            probabilities[row].scatter_(0, order, values)
