"""Decides which activations of a forward pass are kept for backward, and which are recomputed.

Sizes are computed from the shape of the model. They were checked against what the compiler keeps
and against the memory measured on a GPU (`dev/LOG.md`). Recomputing costs time, so it is used
only when the free memory is too small.
"""

import math
from dataclasses import dataclass

from trainer.base_model.architecture import Architecture

FREE_SHARE = 0.95  # of the free memory; fragmentation loses the rest
HEAD = (8192, 38_016)  # tokens and vocabulary entries whose logits are in memory at once


@dataclass(frozen=True)
class Plan:
    """The activations that the layers of one forward pass keep."""

    budget: float
    """torch's `activation_memory_budget`. 1 is fastest; 0.8 recomputes norms and the MLP's product,
    the cheapest to recompute."""
    recomputed: int
    """Number of layers that keep only their input."""


FASTEST = Plan(budget=1.0, recomputed=0)
LEAN = 0.8


def plan(
    architecture: Architecture,
    tokens: int,
    free: int,
    *,
    bytes_each: int = 2,
    fused: bool = False,
    rank: int = 0,
) -> Plan:
    """Return the fastest plan for a row of `tokens` that fits into `free` bytes.

    `fused` means that the MLP kernel is used. It recomputes the MLP's product itself, so the
    product is never kept. It sums the gradients of LoRAs of `rank` from one part per 64 tokens.
    """
    a = architecture
    attention = 2 * (a.heads + a.kv_heads) * a.head_dim  # q, k, v and the output
    fast = (4 * a.dim + attention + (2 if fused else 3) * a.ffn_dim) * tokens * bytes_each
    lean = (2 * a.dim + attention + 2 * a.ffn_dim) * tokens * bytes_each
    least = a.dim * tokens * bytes_each
    # The gradients of the current layer, about as large as what it keeps, or the head's logits,
    # and the head's gradients, in fp32 for every token.
    parts = 12 * (tokens // 64) * a.ffn_dim * rank if fused else 0
    logits = 4 * min(tokens, HEAD[0]) * min(a.vocab_size, HEAD[1])
    transient = max(fast + parts, logits) + 8 * a.dim * tokens
    available = free * FREE_SHARE - transient
    if a.layers * fast <= available:
        return FASTEST
    short = a.layers * lean - available
    return Plan(LEAN, min(max(math.ceil(short / (lean - least)), 0), a.layers))
