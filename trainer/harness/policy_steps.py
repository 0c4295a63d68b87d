"""`PolicySteps`: the policy's steps as the trainer adapter tells them, for sampling ahead."""

from collections.abc import Awaitable, Callable
from typing import Any

from kit.errors import ConfigError


class PolicySteps:
    """Asks an adapter for steps. Raises if it lacks a method that a setting needs."""

    def __init__(self, adapter: Any, *, pinned: str | None) -> None:
        """`pinned` names the LLM of which a run makes all calls to one step."""
        self.served = 0
        """The step that the backend serves, when it was last asked."""
        self._current: Callable[[], Awaitable[int]] = _method(
            adapter, "current_step", "max_steps_off_policy", "set `max_steps_off_policy: 0`"
        )
        self._newest: Callable[[], Awaitable[int]] = getattr(adapter, "newest_step", self._current)
        self._model_at: Callable[[int], str] | None = None
        self._pinned = pinned or ""
        if pinned:
            self._model_at = _method(adapter, "model_at", "pin_runs", "remove the setting")

    async def ask(self) -> None:
        """Find out which step is served now."""
        self.served = int(await self._current())

    async def newest(self) -> int:
        """Return the step from which the next job is trained, which may still train itself."""
        return int(await self._newest())

    @property
    def pins(self) -> bool:
        """Whether all calls of a run are sampled from one step."""
        return self._model_at is not None

    @property
    def models(self) -> dict[str, str]:
        """The policy's name for runs that start now, by LLM, if they are pinned to a step."""
        return {self._pinned: self._model_at(self.served)} if self._model_at else {}


def _method(adapter: Any, name: str, setting: str, otherwise: str) -> Any:
    if found := getattr(adapter, name, None):
        return found
    raise ConfigError(
        f"`finetuning.{setting}` needs a trainer adapter with `{name}`",
        hint=f"Add the method to your adapter, or {otherwise}",
    )
