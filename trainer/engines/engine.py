"""What samples tokens, as the gateway sees it: tokens in, tokens out, one protocol for all."""

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
    """One prompt to be continued, with everything the engine needs to do so."""

    prompt_ids: list[int]
    lora: str | None = None
    """Name of a loaded LoRA, or None for the base model."""
    n: int = 1
    max_tokens: int | None = None
    """None: as many as fit."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Keep so many of the likeliest tokens; 0 keeps all."""
    stop: tuple[str, ...] = ()
    seed: int | None = None
    stream: bool = False
    """Deltas token by token; else one a choice, at its end."""


@dataclass
class Delta:
    """What one choice gained since its last delta."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: Literal["stop", "length"] | None = None

    def extend(self, later: "Delta") -> None:
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.text += later.text
        self.finish_reason = later.finish_reason


class Engine(Protocol):
    """A sampler in a process of its own."""

    name: str

    @property
    def running(self) -> bool: ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def configure(self, arguments: Mapping[str, Any]) -> None:
        """Take the `engine_args` of one more client; what differs from another's is a Conflict."""

    async def make_room(self) -> bool:
        """Leave the GPU it shares to the learner until its next use; False where it cannot."""

    async def load(self, lora: str, path: Path) -> None:
        """Make the LoRA in `path` available; a name that is loaded already stays as it is."""

    async def unload(self, lora: str) -> None: ...

    def sample(self, request: SampleRequest) -> AsyncIterator[Delta]:
        """Yield deltas until every choice has finished."""


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
