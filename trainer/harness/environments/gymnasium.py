"""Environments with Gymnasium's `reset` and `step`, whose observations and actions are text."""

import importlib
import inspect
import math
from collections.abc import Sequence
from typing import Any

from kit.errors import ConfigError, NotInstalled
from kit.types import Json
from trainer.harness.environments.environment import Split
from trainer.harness.llm import Llm
from trainer.harness.types import Example, Outcome, WorkflowRun
from trainer.harness.user_code import call, import_object
from trainer.harness.workflow_config import GymnasiumConfig


class GymnasiumEnvironment:
    """Plays one episode per run: the observation is the question, the answer is the action.

    The reward is the sum of the steps' rewards. An example is a seed.
    """

    def __init__(self, config: GymnasiumConfig) -> None:
        self._config = config
        self._make = _factory(config.env)

    def examples(self, split: Split) -> list[Example]:
        count = self._config.episodes
        seeds = range(count)
        if split == "eval":
            seeds = range(count, count + self._config.validation_examples)
        return [Example(f"seed-{seed}", None, None, {"seed": seed}) for seed in seeds]

    async def run(self, example: Example, llm: Llm) -> Outcome:
        environment = await call(self._make, **self._config.args)
        try:
            return await self._play(environment, example.row["seed"], llm)
        finally:
            if hasattr(environment, "close"):
                await call(environment.close)

    async def _play(self, environment: Any, seed: int, llm: Llm) -> Outcome:
        prompt = self._config.system_prompt
        head: list[Json] = [{"role": "system", "content": prompt}] if prompt else []
        observation, info = await _reset(environment, seed)
        messages: list[Json] = []
        rewards: list[float] = []
        terminated = False
        text = ""
        while len(rewards) < self._config.max_turns:
            if self._config.history == "last":
                messages = []
            messages.append({"role": "user", "content": _text(observation)})
            message = await llm.chat([*head, *messages])
            text = str(message.get("content") or "")
            messages.append({"role": "assistant", "content": text})
            observation, reward, terminated, truncated, info = await _step(environment, text)
            rewards.append(reward)
            llm.reward(reward)
            if terminated or truncated:
                break
        numbers = {
            str(name): float(value)
            for name, value in info.items()
            if isinstance(value, bool | int | float) and math.isfinite(value)
        }
        metrics = {"turns": float(len(rewards)), "terminated": float(terminated), **numbers}
        return Outcome(text, {**metrics, "reward": math.fsum(rewards)})

    async def score(self, runs: Sequence[WorkflowRun]) -> list[Any]:
        return [run.state for run in runs]

    async def close(self) -> None:
        """Each run closes its own environment."""


def _factory(name: str) -> Any:
    if ":" in name:
        return import_object(name)
    try:
        gymnasium: Any = importlib.import_module("gymnasium")
    except ImportError as exc:
        raise NotInstalled(
            f"The environment `{name}` is an id of Gymnasium, which is not installed",
            hint="Install it with `pip install gymnasium`, or write `module:Class`",
        ) from exc
    try:
        spec = gymnasium.spec(name)
    except gymnasium.error.Error as exc:
        raise ConfigError(
            f"Gymnasium has no environment `{name}`: {exc}",
            hint="Correct the id, or name the class as `module:Class`",
        ) from exc
    return lambda **arguments: gymnasium.make(spec, **arguments)


async def _reset(environment: Any, seed: int) -> tuple[Any, dict[str, Any]]:
    """Call `reset`, with the seed if it takes one. It may return the observation alone."""
    parameters = inspect.signature(environment.reset).parameters
    kinds = [parameter.kind for parameter in parameters.values()]
    takes_seed = "seed" in parameters or inspect.Parameter.VAR_KEYWORD in kinds
    found = await call(environment.reset, **({"seed": seed} if takes_seed else {}))
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict):
        return found
    return found, {}


async def _step(environment: Any, text: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
    found = await call(environment.step, text)
    if not isinstance(found, tuple) or len(found) != 5:
        raise TypeError(
            "`step` must return (observation, reward, terminated, truncated, info), "
            f"but returned `{found!r:.60}`"
        )
    observation, reward, terminated, truncated, info = found
    return observation, float(reward), bool(terminated), bool(truncated), dict(info or {})


def _text(observation: Any) -> Any:
    """Return text and lists of content parts as they are, and anything else as text."""
    return observation if isinstance(observation, str | list) else str(observation)
