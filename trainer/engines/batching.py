"""Batching in the embedded engine: pending choices, prefill batches and the cache's shape."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kit.types import Json
from trainer.base_model.tokenizer import Tokenizer
from trainer.config import LoraConfig
from trainer.engines.engine import SampleRequest, TopLogprobs
from trainer.engines.rules import Rules
from trainer.engines.sampling import Sampling, likeliest, score_prompt
from trainer.engines.text import TextStream
from trainer.errors import BadRequest

LoadedLora = tuple[LoraConfig, dict[str, Tensor]]
PREFILL = 2048  # prompt tokens in one prefill batch, padding included


@dataclass
class PendingRequest:
    """A request with unfinished choices: a prompt, and how to continue it."""

    id: int
    sample: SampleRequest
    lora: LoadedLora | None  # not its name, which may belong to another LoRA by the time it is used
    unfinished: int
    scores: dict[str, list[Any]] | None = None
    """The logprobs of the prompt, as fields of a delta, once computed."""

    @property
    def prompt(self) -> list[int]:
        return self.sample.prompt_ids

    @property
    def to_score(self) -> bool:
        return self.sample.prompt_logprobs and self.scores is None


@dataclass
class PendingChoice:
    """An unfinished choice: one row of the batch, or waiting for one."""

    request: PendingRequest
    index: int
    limit: int
    sampling: Sampling
    random: random.Random
    text: TextStream
    rules: Rules | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: TopLogprobs = field(default_factory=list)
    unsent_text: str = ""
    sent: int = 0
    began: bool = False

    def unsent(self, finish: str | None) -> Json:
        """Return the delta of what was not sent yet, and mark it as sent."""
        first, self.sent = self.sent, len(self.tokens)
        delta = {
            "index": self.index,
            "text": self.unsent_text,
            "token_ids": self.tokens[first:],
            "logprobs": self.logprobs[first:],
            "top_logprobs": self.top_logprobs[first:],
            "finish_reason": finish,
        }
        self.unsent_text = ""
        if not self.began and self.request.scores is not None:
            delta.update(self.request.scores)
        self.began = True
        return delta

    @property
    def length(self) -> int:
        return len(self.request.prompt) + len(self.tokens)

    @property
    def context(self) -> tuple[int, ...]:
        """The prompt and the tokens so far; a choice that lost its row already has some."""
        return (*self.request.prompt, *self.tokens)


def new_choices(request: PendingRequest, limit: int, tokenizer: Tokenizer) -> list[PendingChoice]:
    """Return the choices of a request; those with a constraint still lack its matcher."""
    sample = request.sample
    ends = frozenset(sample.stop_token_ids)
    if not sample.ignore_eos:
        ends |= tokenizer.eos_ids
    sampling = Sampling(sample.temperature, sample.top_p, sample.top_k, sample.min_p)
    return [
        PendingChoice(
            request,
            index,
            limit,
            sampling,
            random.Random(None if sample.seed is None else f"{sample.seed}/{index}"),
            TextStream(tokenizer, sample.stop, ends, sample.min_tokens),
            Rules(sample, ends) if Rules.needed(sample) else None,
        )
        for index in range(sample.n)
    ]


def apply_rules(
    choices: list[PendingChoice], logits: Tensor
) -> tuple[dict[int, Tensor], dict[int, BadRequest]]:
    """Return the logits that rules change, by row, and the errors of rules, by request."""
    changed: dict[int, Tensor] = {}
    failed: dict[int, BadRequest] = {}
    for row, choice in enumerate(choices):
        if choice.rules:
            try:
                changed[row] = choice.rules.apply(logits[row], choice.tokens)
            except BadRequest as error:
                failed[choice.request.id] = error
    return changed, failed


def add_top_logprobs(choices: list[PendingChoice], logits: Tensor) -> None:
    """Add the likeliest next tokens to the choices whose requests ask for them."""
    asked = {row: n for row, c in enumerate(choices) if (n := c.request.sample.top_logprobs)}
    if asked:
        found = likeliest(logits[list(asked)], max(asked.values()))
        for (row, count), top in zip(asked.items(), found, strict=True):
            choices[row].top_logprobs.append(top[:count])


def score_prompts(
    choices: list[PendingChoice],
    states: dict[tuple[int, ...], Tensor],
    to_logits: Callable[[Tensor], Tensor],
) -> None:
    """Add the logprobs of prompts, given their hidden states, to the requests that want them."""
    for choice in choices:
        request = choice.request
        if request.to_score and choice.context in states:
            top = request.sample.top_logprobs
            request.scores = score_prompt(to_logits, states[choice.context], request.prompt, top)


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
