"""The cards that SkyPilot rents most, and how long work takes on one of them.

Times are estimates from a card's arithmetic and memory speed, fitted to one measured card, an H200
with a 7B model (`bench/results/gpu_smoke.md`). They may be off by a factor of two elsewhere.
"""

from dataclasses import dataclass

from kit.errors import ConfigError
from kit.model_shape import ModelShape

SHARE_OF_PEAK = 0.5
"""Of a card's bf16 arithmetic, as the learner reached it on an H200."""
SHARE_OF_BANDWIDTH = 0.6
SAMPLING_OVERHEAD = 1.5
LEAST_STEP_S = 0.01
"""Seconds that one token of every running sequence takes at least."""
STEP_OVERHEAD_S = 1.0
"""Seconds of a training step that are neither sampling nor gradients."""


@dataclass(frozen=True)
class Card:
    """One GPU, by SkyPilot's name for it."""

    name: str
    memory_gib: float
    teraflops: float
    """Dense bf16 arithmetic."""
    bandwidth_gb_s: float


CARDS = {
    card.name: card
    for card in (
        Card("L4", 22.5, 121, 300),
        Card("A10G", 22.5, 125, 600),
        Card("RTX4090", 23.6, 165, 1008),
        Card("L40S", 44.5, 362, 864),
        Card("A100", 39.4, 312, 1555),
        Card("A100-80GB", 79.2, 312, 2039),
        Card("H100", 79.2, 989, 3350),
        Card("H200", 139.7, 989, 4800),
        Card("B200", 178.0, 2250, 8000),
    )
}
"""Cards by name, in the order of their memory as a program sees it."""


def find_card(name: str) -> Card:
    for card in CARDS.values():
        if card.name.lower() == name.lower():
            return card
    raise ConfigError(f"There is no card `{name}`", hint=f"Choose one of {', '.join(CARDS)}")


def sampling_seconds(shape: ModelShape, card: Card, *, tokens: int, at_once: int) -> float:
    """Seconds to sample `tokens` tokens in `at_once` sequences that run together."""
    weights = 2 * shape.parameters / (card.bandwidth_gb_s * 1e9 * SHARE_OF_BANDWIDTH)
    arithmetic = 2 * shape.parameters * at_once / (card.teraflops * 1e12 * SHARE_OF_PEAK)
    step = max(SAMPLING_OVERHEAD * (weights + arithmetic), LEAST_STEP_S)
    return step * tokens / at_once


def training_seconds(shape: ModelShape, card: Card, *, tokens: int) -> float:
    """Seconds of the forward and backward pass over `tokens` tokens: 4 FLOP for each weight."""
    return 4 * shape.parameters * tokens / (card.teraflops * 1e12 * SHARE_OF_PEAK)
