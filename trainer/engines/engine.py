"""The `Engine` protocol: token ids in, token ids out, the same for every engine."""

import itertools
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from trainer.errors import WorkerDied

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SampleRequest:
    """One prompt to continue, and how to sample from it."""

    prompt_ids: list[int]
    lora: str | None = None
    """Name of a loaded LoRA, or None for the base model."""
    n: int = 1
    max_tokens: int | None = None
    """None means as many as fit the context."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Sample only from this many of the likeliest tokens; 0 means from all."""
    stop: tuple[str, ...] = ()
    seed: int | None = None
    stream: bool = False
    """Yield a delta for each token; otherwise one per choice, when it finishes."""


@dataclass
class Delta:
    """Tokens and text added to one choice since its previous delta."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: Literal["stop", "length"] | None = None
    choice_id: str = ""
    """The choice's id in the ledger, which the backend adds; engines leave it empty."""

    def extend(self, later: "Delta") -> None:
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.text += later.text
        self.finish_reason = later.finish_reason
        self.choice_id = later.choice_id


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
