"""Sampling the next token of every row of a batch: pure functions of logits [B, V]."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 256


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of one row."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Sample only from this many of the likeliest tokens; 0 means from all."""
    min_p: float = 0.0
    """Sample only from tokens at least this likely, relative to the likeliest one."""


def choose(
    logits: Tensor,  # [B, V]
    samplings: Sequence[Sampling],  # one per row
    uniforms: Sequence[float],  # one per row, in [0, 1)
    changed: Mapping[int, Tensor] | None = None,
) -> tuple[list[int], list[float]]:
    """Choose a token for each row; return the tokens and their logprobs under the policy.

    `changed` holds the logits [V] of the rows that rules changed. The logprobs are those before
    these rules, temperature, top-p, top-k and min-p, because the learner computes the same ones.
    """
    policy = logits = logits.float()
    temperatures = torch.tensor([max(s.temperature, 1e-6) for s in samplings], device=logits.device)
    probabilities = logits.softmax(dim=-1)
    tempered = probabilities
    if changed:
        logits = policy.clone()
        for row, values in changed.items():
            logits[row] = values
    if changed or bool((temperatures != 1).any()):
        tempered = (logits / temperatures[:, None]).softmax(dim=-1)
    if any(s.top_k or s.top_p < 1 or s.min_p for s in samplings):
        tempered = _keep_likeliest(tempered, samplings)
    chosen = _draw(tempered, torch.tensor(uniforms, device=logits.device))
    greedy = torch.tensor([s.temperature == 0 for s in samplings], device=logits.device)
    if bool(greedy.any()):
        chosen = torch.where(greedy, logits.argmax(dim=-1), chosen)
    logprobs = probabilities.gather(1, chosen[:, None])[:, 0].log()
    for row in changed or ():  # rules can force a token whose probability rounds to zero
        logprobs[row] = policy[row].log_softmax(dim=-1)[chosen[row]]
    # JSON cannot hold -inf, and a drawn token has some probability.
    return chosen.tolist(), logprobs.clamp(min=-9999.0).tolist()


def likeliest(logits: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """Return the `count` likeliest tokens of each row [B, V] with the policy's logprobs."""
    top = logits.float().log_softmax(dim=-1).topk(min(count, logits.shape[-1]))
    rows = zip(top.indices.tolist(), top.values.clamp(min=-9999.0).tolist(), strict=True)
    return [list(zip(tokens, logprobs, strict=True)) for tokens, logprobs in rows]


def score_prompt(
    to_logits: Callable[[Tensor], Tensor],  # [N, D] -> [N, V]
    states: Tensor,  # [T, D]
    prompt: Sequence[int],
    top: int,
) -> dict[str, list[Any]]:
    """Return the policy's logprob of each token of a prompt, as in a `Delta`."""
    logprobs: list[float | None] = [None]
    likely: list[list[tuple[int, float]]] = [[]]
    # In parts: the logits of a whole prompt may not fit the memory.
    for start in range(0, len(prompt) - 1, BLOCK):
        tokens = prompt[start + 1 : start + 1 + BLOCK]
        logits = to_logits(states[start : start + len(tokens)])
        every = logits.float().log_softmax(dim=-1)
        found = every.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
        logprobs += found.clamp(min=-9999.0).tolist()
        if top:
            likely += likeliest(logits, top)
    return {"prompt_logprobs": logprobs, "prompt_top_logprobs": likely if top else []}


def _draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw a column for each row of `weights` [B, V] by inverting the cumulative distribution.

    Finds a block of columns first, then a column in it: on a CPU a sum over all columns is fast,
    a running sum is slow, and `multinomial` draws serially.
    """
    batch, width = weights.shape
    blocks = functional.pad(weights, (0, -width % BLOCK)).view(batch, -1, BLOCK)
    running = blocks.sum(dim=-1).cumsum(dim=-1)  # [B, V / BLOCK]
    draws = uniforms[:, None] * running[:, -1:]
    block = _first_above(running, draws)
    before = functional.pad(running, (1, 0)).gather(1, block)
    inside = blocks[torch.arange(batch, device=block.device), block[:, 0]].cumsum(dim=-1)
    return (block * BLOCK + _first_above(inside, draws - before))[:, 0]


def _first_above(running: Tensor, draws: Tensor) -> Tensor:
    """Return where the running sums [B, N] first exceed the draws [B, 1].

    The draws are clamped, so that rounding cannot push one past the last sum.
    """
    last = running[:, -1:]
    draws = draws.clamp(min=0).minimum(last.nextafter(torch.zeros_like(last)))
    return torch.searchsorted(running, draws, right=True)


def _keep_likeliest(probabilities: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Zero the tokens that min-p, top-k and top-p exclude; rows that use none cost nothing."""
    probabilities = probabilities.clone()
    for row, sampling in enumerate(samplings):
        if sampling.min_p:
            least = sampling.min_p * probabilities[row].max()
            probabilities[row, probabilities[row] < least] = 0
        if sampling.top_k:
            kept = probabilities[row].topk(min(sampling.top_k, probabilities.shape[1]))
            probabilities[row].zero_().scatter_(0, kept.indices, kept.values)
        if sampling.top_p < 1:
            values, order = probabilities[row].sort(descending=True)
            # Keep a token while the likelier ones sum to less than top_p.
            excluded = values.cumsum(0) - values >= sampling.top_p * values.sum()
            excluded[0] = False  # keep the first even if top_p rounds to zero
            values[excluded] = 0
            probabilities[row].scatter_(0, order, values)
    return probabilities
