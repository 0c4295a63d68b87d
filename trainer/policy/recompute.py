"""How much of a forward pass is kept for the backward pass, and how much is computed again.

Kept sizes are counted from the shape of the model; they were compared with what the compiler keeps
and with the memory measured on a GPU (`docs/gpu.md`). Computing again costs time, so as little is
computed again as the free memory allows.
"""

import math
from dataclasses import dataclass

from trainer.base_model.architecture import Architecture

FREE_SHARE = 0.95  # of the free memory; the rest is lost to fragments
HEAD = (8192, 38_016)  # tokens and words whose logits are in memory at once


@dataclass(frozen=True)
class Plan:
    """What the layers of one forward pass keep."""

    budget: float
    """`activation_memory_budget`: 1 keeps what is fastest; 0.8 makes norms and the MLP's product
    again from what is kept, the cheapest of all to make again."""
    recomputed: int
    """Layers of which only the input is kept."""


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
    """The fastest plan for a row of `tokens` that fits `free` bytes.

    `fused`: the MLP's kernel makes the MLP's product again by itself, so it is never kept; the
    gradients of its LoRAs, of that rank, are summed from those of every 64 tokens.
    """
    a = architecture
    attention = 2 * (a.heads + a.kv_heads) * a.head_dim  # q, k, v and the result
    fast = (4 * a.dim + attention + (2 if fused else 3) * a.ffn_dim) * tokens * bytes_each
    lean = (2 * a.dim + attention + 2 * a.ffn_dim) * tokens * bytes_each
    least = a.dim * tokens * bytes_each
    # The gradients of the layer under way, about as large as what it keeps, and the head's, which
    # are in fp32 for every token.
    parts = 12 * (tokens // 64) * a.ffn_dim * rank if fused else 0
    logits = 4 * min(tokens, HEAD[0]) * min(a.vocab_size, HEAD[1])
    under_way = max(fast + parts, logits) + 8 * a.dim * tokens
    room = free * FREE_SHARE - under_way
    if a.layers * fast <= room:
        return FASTEST
    short = a.layers * lean - room
    return Plan(LEAN, min(max(math.ceil(short / (lean - least)), 0), a.layers))
