"""What `VllmEngine` needs of the other machines when vLLM is divided over several."""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from kit.types import Json
from trainer.errors import WorkerDied


class OtherParts(Protocol):
    """The parts of one vLLM that run on other machines."""

    environment: Mapping[str, str]
    """Variables of this machine's part."""
    failure: WorkerDied | None
    """Why a part was lost since the last start, if one was."""

    async def start(
        self, arguments: Mapping[str, Any], on_lost: Callable[[], Awaitable[None]]
    ) -> Json:
        """Start all parts anew, and return further arguments for this machine's.

        vLLM would wait forever for a part that is lost; `on_lost` ends this machine's.
        """

    async def share(self, lora: str, path: Path) -> Path:
        """Return where the LoRA is found on every machine, after sending it there."""

    async def unshare(self, lora: str) -> None: ...

    async def stop(self) -> None:
        """End all parts, and keep their machines."""

    async def leave(self) -> None:
        """End all parts, and give their machines back."""
