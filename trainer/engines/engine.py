"""The `Engine` protocol: token ids in, token ids out, the same for every engine."""

import itertools
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from kit.types import Json
from trainer.errors import WorkerDied

logger = logging.getLogger(__name__)


TopLogprobs = list[list[tuple[int, float]]]
"""For each position, the likeliest tokens with their logprobs, likeliest first."""


@dataclass(frozen=True)
class Constraint:
    """A form that the text of a choice must match."""

    kind: Literal["json_schema", "json_object", "regex", "choice", "grammar"]
    value: str = ""
    """A JSON schema, nothing, a regular expression, a JSON list of strings, or a Lark grammar of
    llguidance, which may contain `%json{...}`."""


@dataclass(frozen=True)
class SampleRequest:
    """One prompt to continue, and how to sample from it."""

    prompt_ids: list[int]
    lora: str | None = None
    """Name of a loaded LoRA, or None for the base model."""
    n: int = 1
    max_tokens: int | None = None
    """None means as many as fit the context; 0 is allowed together with `prompt_logprobs`."""
    max_length: int | None = None
    """Limit of prompt and completion together if `max_tokens` is None; may exceed the context."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Sample only from this many of the likeliest tokens; 0 means from all."""
    min_p: float = 0.0
    """Sample only from tokens at least this likely, relative to the likeliest one."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    """These two consider the completion so far; `repetition_penalty` the prompt as well."""
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    """The choice neither ends nor stops before this many tokens."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    constraint: Constraint | None = None
    top_logprobs: int = 0
    """How many of the likeliest tokens to return at each position, at most 20."""
    prompt_logprobs: bool = False
    """Return the logprobs of the prompt's tokens too, with `top_logprobs` of each."""
    seed: int | None = None
    stream: bool = False
    """Yield a delta for each token; otherwise one per choice, when it finishes."""

    @property
    def most_tokens(self) -> int | None:
        """The request's own limit of a choice's tokens; None means as many as fit the context."""
        if self.max_tokens is None and self.max_length is not None:
            return self.max_length - len(self.prompt_ids)
        return self.max_tokens

    @classmethod
    def from_json(cls, params: Json) -> "SampleRequest":
        """Restore a request that was sent to another process with `dataclasses.asdict`."""
        constraint = params.get("constraint")
        restored = {
            "stop": tuple(params.get("stop", ())),
            "stop_token_ids": tuple(params.get("stop_token_ids", ())),
            "logit_bias": tuple((token, bias) for token, bias in params.get("logit_bias", ())),
            "constraint": Constraint(**constraint) if constraint else None,
        }
        return cls(**{**params, **restored})


@dataclass
class Delta:
    """Tokens and text added to one choice since its previous delta.

    All logprobs are the policy's own: before temperature, penalties, bias and constraint, because
    the learner computes the same ones. While a constrained choice is streamed, its tokens may come
    later than its text: with the last delta, where the engine learns these logprobs at the end.
    """

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: Literal["stop", "length"] | None = None
    choice_id: str = ""
    """The choice's id in the ledger, which the backend adds; engines leave it empty."""
    top_logprobs: TopLogprobs = field(default_factory=list)
    """One entry for each token if requested, else empty."""
    prompt_logprobs: list[float | None] | None = None
    """In the first delta of each choice if requested: one for each token, None for the first."""
    prompt_top_logprobs: TopLogprobs = field(default_factory=list)

    @classmethod
    def from_json(cls, row: Json) -> "Delta":
        """Restore a delta that another process sent. Raises TypeError if it is of another kind."""
        delta = cls(**row)
        for name in ("top_logprobs", "prompt_top_logprobs"):
            restored = [[(token, value) for token, value in top] for top in getattr(delta, name)]
            setattr(delta, name, restored)
        return delta

    def extend(self, later: "Delta") -> None:
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.text += later.text
        self.finish_reason = later.finish_reason
        self.choice_id = later.choice_id
        self.top_logprobs += later.top_logprobs
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = later.prompt_logprobs
            self.prompt_top_logprobs = later.prompt_top_logprobs


class Engine(Protocol):
    """Samples tokens in a separate process."""

    name: str

    @property
    def running(self) -> bool: ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def configure(self, arguments: Mapping[str, Any]) -> None:
        """Add a client's `engine_args`. Raises Conflict if another client set another value."""

    async def make_room(self) -> bool:
        """Free the GPU memory for the learner until the next request; False if it cannot."""

    async def load(self, lora: str, path: Path) -> None:
        """Make the LoRA in `path` available; does nothing if the name is already loaded."""

    async def unload(self, lora: str) -> None: ...

    def sample(self, request: SampleRequest) -> AsyncIterator[Delta]:
        """Yield deltas until all choices have finished."""


Attempt = Callable[[], AbstractAsyncContextManager[AsyncIterator[Delta]]]
"""Starts to sample a request: a context manager around its deltas."""


async def sample_with_retries(
    attempt: Attempt, *, attempts: int, stream: bool
) -> AsyncIterator[Delta]:
    """Sample, and start over when the engine dies before any delta was passed on.

    Without `stream` the deltas are held back until the last one, so a death loses none of them.
    """
    for number in itertools.count(1):
        passed_on = False
        held: list[Delta] = []
        try:
            async with attempt() as deltas:
                async for delta in deltas:
                    if stream:
                        passed_on = True
                        yield delta
                    else:
                        held.append(delta)
            break
        except WorkerDied as error:
            if passed_on or number == attempts:
                raise
            logger.warning("sampling again after: %s", error.message)
    for delta in held:
        yield delta
