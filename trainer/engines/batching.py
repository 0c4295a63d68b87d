"""What the embedded engine batches: the choices of requests, and prompts of like length."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from trainer.config import LoraConfig
from trainer.engines.sampling import Sampling
from trainer.engines.text import TextStream

Lora = tuple[LoraConfig, dict[str, Tensor]]
PREFILL = 2048  # tokens of prompts computed at once


@dataclass
class Call:
    """One request: a prompt and the choices that continue it."""

    id: int
    prompt: list[int]
    lora: Lora | None  # itself, not its name, which may be another's by the time it is used
    stream: bool
    unfinished: int


@dataclass
class Choice:
    """One row of the batch."""

    call: Call
    index: int
    limit: int
    sampling: Sampling
    random: random.Random
    text: TextStream
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    pending: dict[str, Any] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return len(self.call.prompt) + len(self.tokens)

    @property
    def seen(self) -> tuple[int, ...]:
        """All that the next token depends on: more than the prompt if the row was given up."""
        return (*self.call.prompt, *self.tokens)


def prefill_batches(prompts: Iterable[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Prompts of like length together, as many as fit `PREFILL` tokens with their padding."""
    batches: list[list[tuple[int, ...]]] = []
    for prompt in sorted(prompts, key=len):
        if batches and (len(batches[-1]) + 1) * len(prompt) <= PREFILL:
            batches[-1].append(prompt)
        else:
            batches.append([prompt])
    return batches


def cache_shape(rows: int, length: int, *, context: int, budget: int) -> tuple[int, int]:
    """Rows and tokens of a cache for these: doubled, so that growing costs little.

    It is made for what is needed now, not for the most rows and the longest one ever met: 64 short
    ones at one time and one of 8,192 tokens at another would make 12 GB of a model of 135M.
    """
    rows = max(rows, min(_doubled(rows), budget // length))
    least = length if length <= budget else min(length + 255, context)  # one that is alone
    return rows, max(least, min(max(256, _doubled(length)), context, budget // rows))


def _doubled(size: int) -> int:
    return 1 << (size - 1).bit_length()
