"""Environments of the package `verifiers` up to 0.3: a dataset, a rollout and a rubric."""

import asyncio
import contextlib
import importlib
import os
from collections.abc import Sequence
from typing import Any

from kit.errors import ConfigError
from trainer.harness.environments.environment import Split
from trainer.harness.llm import Llm
from trainer.harness.types import Example, Outcome, WorkflowRun
from trainer.harness.workflow_config import VerifiersConfig

# `verifiers` reads the key of an endpoint from a variable that its config names.
KEY_VARIABLE = "ART_CLUSTER_LLM_KEY"


def cannot_load(config: VerifiersConfig, error: Exception) -> ConfigError:
    return ConfigError(
        f"The environment `{config.env}` cannot be loaded: {error}",
        hint="Check `workflow.args`, and the packages and files that the environment needs",
    )


class ClassicEnvironment:
    """An environment with a dataset, `rollout` and a rubric.

    All runs of an example are scored together, so a rubric may compare them.
    """

    def __init__(self, config: VerifiersConfig, environment: Any) -> None:
        self._config = config
        self._environment = environment

    def examples(self, split: Split) -> list[Example]:
        environment, config = self._environment, self._config
        if split == "train":
            rows = environment.get_dataset(n=config.max_examples or -1)
        else:
            # Without a split of its own it returns the training examples.
            rows = environment.get_eval_dataset(n=config.validation_examples)
        examples = []
        for number, row in enumerate(rows):
            id = f"{split}-{row.get('example_id', number)}"
            examples.append(Example(id, row.get("prompt"), row.get("answer"), dict(row)))
        if not examples:
            purpose = "train" if split == "train" else "validate"
            raise ConfigError(f"The environment `{config.env}` has no examples to {purpose} on")
        return examples

    async def run(self, example: Example, llm: Llm) -> Outcome:
        client, close = _client(llm)
        try:
            state = await self._environment.rollout(
                dict(example.row), client, llm.model, dict(llm.config.sampling)
            )
        finally:
            await close()
        if state.get("error") is not None:
            raise RuntimeError(f"the environment's rollout failed: {state['error']!r}")
        return Outcome(_last_text(state.get("completion")), state)

    async def score(self, runs: Sequence[WorkflowRun]) -> list[Any]:
        states = [run.state for run in runs]
        rubric = self._environment.rubric
        await rubric.score_group(states)
        if hasattr(rubric, "cleanup"):
            for state in states:
                await rubric.cleanup(state)
        return [{**(state.get("metrics") or {}), "reward": state["reward"]} for state in states]

    async def close(self) -> None:
        if hasattr(self._environment, "_teardown"):
            with contextlib.suppress(Exception):  # the training has ended, whatever this raises
                await asyncio.wait_for(self._environment._teardown(), 60)


def _client(llm: Llm) -> tuple[Any, Any]:
    """Return a client for the run's base URL as this version of `verifiers` takes it."""
    timeout, retries = llm.config.request_timeout, llm.config.max_retries
    try:
        clients: Any = importlib.import_module("verifiers.clients")
        types: Any = importlib.import_module("verifiers.types")
    except ImportError:  # before 0.1.10
        openai: Any = importlib.import_module("openai")
        client = openai.AsyncOpenAI(
            base_url=llm.base_url, api_key=llm.api_key, timeout=timeout, max_retries=retries
        )
        return client, client.close
    os.environ[KEY_VARIABLE] = llm.api_key
    client = clients.resolve_client(
        types.ClientConfig(
            api_base_url=llm.base_url,
            api_key_var=KEY_VARIABLE,
            timeout=timeout,
            max_retries=retries,
        )
    )
    return client, client.close


def _last_text(completion: Any) -> str:
    """Return the text of the last assistant message."""
    if isinstance(completion, str):
        return completion
    for message in reversed(completion or []):
        get = message.get if isinstance(message, dict) else lambda name: getattr(message, name)  # noqa: B023
        if get("role") == "assistant":
            return str(get("content") or "")
    return ""
