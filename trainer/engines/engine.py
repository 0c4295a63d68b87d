"""What samples tokens, as the gateway sees it: one protocol for every engine."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol


@dataclass(frozen=True)
class SampleRequest:
    """One chat to be continued, with everything the engine needs to do so."""

    messages: list[dict[str, Any]]
    lora: str | None = None
    """Name of a loaded LoRA, or None for the base model."""
    n: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stream: bool = False
    """Deltas token by token; else one a choice, at its end."""
    seed: int | None = None


@dataclass
class Delta:
    """What one choice gained since the last delta."""

    index: int
    token_ids: list[int]
    logprobs: list[float]
    text: str
    finish_reason: Literal["stop", "length"] | None = None
    prompt_ids: list[int] = field(default_factory=list)
    """Given with the first delta of a request, whatever its index."""


class Engine(Protocol):
    """A sampler in a process of its own."""

    name: str

    @property
    def running(self) -> bool: ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def load(self, lora: str, path: Path) -> None:
        """Make the LoRA in `path` available under a name that was never used before."""

    async def unload(self, lora: str) -> None: ...

    def sample(self, request: SampleRequest) -> AsyncIterator[Delta]:
        """Yield deltas until every choice has finished."""
