"""What samples tokens, as the gateway sees it: tokens in, tokens out, one protocol for all."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol


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
