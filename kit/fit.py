"""Whether a model can be sampled and trained on a card: weights, LoRA, cache and activations.

The sizes of activations are those that the learner plans with (`trainer/policy/recompute.py`).
"""

from dataclasses import dataclass
from typing import Protocol

from kit.gpus import Card
from kit.model_shape import ModelShape

GIB = 2**30
HEAD = (8192, 38_016)
"""Tokens and vocabulary entries whose logits the learner has in memory at once."""
USABLE = 0.95
"""Of a card's memory; fragmentation loses the rest."""
ENGINE_BATCH = (8192, 13)
"""Tokens that vLLM computes at once, and bytes of each per unit of the MLP's width."""
ENGINE_GIB = 0.2
"""vLLM's other buffers within its `gpu_memory_utilization` (`bench/results/fit.md`)."""
ENGINE_OUTSIDE_GIB = 2.4
"""What vLLM takes beyond `gpu_memory_utilization`: CUDA graphs, and contexts of its processes."""
LEARNER_GIB = 2.4
TOKENS = 4096
"""Tokens of a row that must be trainable, and of each conversation that must fit into the cache."""
AT_ONCE = 16
"""Conversations of that length that the cache must hold."""
COUNTS = (1, 2, 4, 8)


class LayerSizes(Protocol):
    """The sizes that decide how large activations are."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def ffn_dim(self) -> int: ...


@dataclass(frozen=True)
class Activations:
    """Bytes of activations in a forward and backward pass over one row."""

    fast: int
    """What a layer keeps if nothing is recomputed."""
    lean: int
    """The same without norms and the MLP's product, the cheapest to recompute."""
    least: int
    """The input of a layer, if all else is recomputed."""
    transient: int
    """The gradients of the current layer, or the head's logits, and the head's gradients."""


def activations(
    a: LayerSizes, tokens: int, *, bytes_each: int = 2, fused: bool = False, rank: int = 0
) -> Activations:
    """`fused` means that the MLP kernel is used. It recomputes the MLP's product itself, so the
    product is never kept. It sums the gradients of LoRAs of `rank` from one part per 64 tokens.
    """
    attention = 2 * (a.heads + a.kv_heads) * a.head_dim  # q, k, v and the output
    fast = (4 * a.dim + attention + (2 if fused else 3) * a.ffn_dim) * tokens * bytes_each
    parts = 12 * (tokens // 64) * a.ffn_dim * rank if fused else 0
    logits = 4 * min(tokens, HEAD[0]) * min(a.vocab_size, HEAD[1])
    return Activations(
        fast=fast,
        lean=(2 * a.dim + attention + 2 * a.ffn_dim) * tokens * bytes_each,
        least=a.dim * tokens * bytes_each,
        # About as large as what the layer keeps; the head's gradients in fp32 for every token.
        transient=max(fast + parts, logits) + 8 * a.dim * tokens,
    )


@dataclass(frozen=True)
class Fit:
    """What a model needs on `count` cards of a kind, in GiB of each card."""

    card: Card
    count: int
    engine: float
    """On a card that samples: weights, LoRAs, cache and vLLM itself."""
    learner: float
    """On a card that trains: weights, LoRA with its moments, activations."""

    @property
    def needed(self) -> float:
        """Of the fullest card. One card has both."""
        return self.engine + self.learner if self.count == 1 else max(self.engine, self.learner)

    @property
    def fits(self) -> bool:
        return self.needed <= self.card.memory_gib * USABLE

    @property
    def gpu_memory_utilization(self) -> float | None:
        """vLLM's share of its cards; None for the server's default."""
        if not self.fits:
            return None
        # Several cards: none is shared. On one, vLLM's cache gets half of what nobody needs.
        usable = self.card.memory_gib * USABLE
        most = usable if self.count > 1 else self.engine + (usable - self.needed) / 2
        share = (most - ENGINE_OUTSIDE_GIB) / self.card.memory_gib
        return round(share, 2)


def fit(shape: ModelShape, card: Card, count: int = 1, *, rank: int = 8) -> Fit:
    """How much of each card the model needs, with the least that the learner can keep."""
    engines, learners = divide(shape, count)
    weights = 2 * shape.parameters
    lora = rank * shape.lora_inputs_and_outputs
    cache = AT_ONCE * TOKENS * shape.cache_bytes_per_token
    kept = activations(shape, TOKENS)
    # A learner of several processes gathers the weights of one layer while it computes it, and the
    # next one meanwhile.
    gathered = 0 if learners == 1 else 2 * 2 * shape.layer_parameters
    batch = ENGINE_BATCH[0] * ENGINE_BATCH[1] * shape.ffn_dim
    engine = (weights + cache + batch) / engines + 2 * 2 * lora
    learner = (
        weights / learners
        + gathered
        + 16 * lora  # fp32: weights, gradients and two moments
        + shape.layers * kept.least
        + kept.transient
    )
    own = ENGINE_GIB + ENGINE_OUTSIDE_GIB
    return Fit(card, count, engine / GIB + own, learner / GIB + LEARNER_GIB)


def engine_args(shape: ModelShape, one: Fit) -> dict[str, float]:
    """Settings of vLLM without which the model would not fit, or vLLM would not start."""
    found: dict[str, float] = {}
    if one.gpu_memory_utilization is not None:
        found["gpu_memory_utilization"] = one.gpu_memory_utilization
    if shape.context is not None and shape.context > AT_ONCE * TOKENS:
        # vLLM refuses to start if its cache cannot hold one conversation as long as the context.
        found["max_model_len"] = AT_ONCE * TOKENS
    return found


def divide(shape: ModelShape, count: int) -> tuple[int, int]:
    """How many of `count` cards sample and how many train, as the server divides them."""
    if count == 1:
        return 1, 1
    engines = 1
    while engines * 2 <= count - 1:
        size = engines * 2
        if shape.heads % size or (shape.kv_heads % size and size % shape.kv_heads):
            break
        engines = size
    return engines, count - engines


def fits(shape: ModelShape, cards: list[Card], *, rank: int = 8) -> list[Fit]:
    """The smallest number of each card that holds the model; none for a card that cannot."""
    found = []
    for card in cards:
        tried = (fit(shape, card, count, rank=rank) for count in COUNTS)
        if enough := next((one for one in tried if one.fits), None):
            found.append(enough)
    return found
