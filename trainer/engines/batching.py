"""Batching in the embedded engine: pending choices, prefill batches and the cache's shape."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from trainer.config import LoraConfig
from trainer.engines.sampling import Sampling
from trainer.engines.text import TextStream

LoadedLora = tuple[LoraConfig, dict[str, Tensor]]
PREFILL = 2048  # prompt tokens in one prefill batch, padding included


@dataclass
class PendingRequest:
    """A request with unfinished choices: a prompt, and how to continue it."""

    id: int
    prompt: list[int]
    lora: LoadedLora | None  # not its name, which may belong to another LoRA by the time it is used
    stream: bool
    unfinished: int


@dataclass
class PendingChoice:
    """An unfinished choice: one row of the batch, or waiting for one."""

    request: PendingRequest
    index: int
    limit: int
    sampling: Sampling
    random: random.Random
    text: TextStream
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    unsent_text: str = ""
    sent_tokens: int = 0

    @property
    def length(self) -> int:
        return len(self.request.prompt) + len(self.tokens)

    @property
    def context(self) -> tuple[int, ...]:
        """The prompt and the tokens so far; a choice that lost its row already has some."""
        return (*self.request.prompt, *self.tokens)


def prefill_batches(prompts: Iterable[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Group prompts of similar length into batches of at most `PREFILL` tokens with padding."""
    batches: list[list[tuple[int, ...]]] = []
    for prompt in sorted(prompts, key=len):
        if batches and (len(batches[-1]) + 1) * len(prompt) <= PREFILL:
            batches[-1].append(prompt)
        else:
            batches.append([prompt])
    return batches


def cache_shape(rows: int, length: int, *, context: int, budget: int) -> tuple[int, int]:
    """Return rows and tokens of a cache with room for these, rounded up so that it grows rarely.

    Both follow from the current need, not from the most rows and the longest row ever seen: 64
    short rows at one time and one of 8,192 tokens at another would take 12 GB for a 135M model.
    """
    rows = max(rows, min(_next_power_of_two(rows), budget // length))
    # A choice that exceeds the budget runs alone.
    least = length if length <= budget else min(length + 255, context)
    return rows, max(least, min(max(256, _next_power_of_two(length)), context, budget // rows))


def _next_power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
