"""Decides which activations of a forward pass are kept for backward, and which are recomputed.

Sizes are computed from the shape of the model (`kit/fit.py`). They were checked against what the
compiler keeps and against the memory measured on a GPU (`dev/LOG.md`). Recomputing costs time, so
it is used only when the free memory is too small.
"""

import math
from dataclasses import dataclass

from kit.fit import activations
from trainer.base_model.architecture import Architecture

FREE_SHARE = 0.95  # of the free memory; fragmentation loses the rest


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

    `fused` and `rank` are those of `kit.fit.activations`.
    """
    a = architecture
    kept = activations(a, tokens, bytes_each=bytes_each, fused=fused, rank=rank)
    available = free * FREE_SHARE - kept.transient
    if a.layers * kept.fast <= available:
        return FASTEST
    short = a.layers * kept.lean - available
    return Plan(LEAN, min(max(math.ceil(short / (kept.lean - kept.least)), 0), a.layers))
