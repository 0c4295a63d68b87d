"""Tasksets of `verifiers` 0.4: tasks that an agent program solves, each with its own rewards.

The program runs as a process of this machine and talks to a proxy of `verifiers`, which passes its
requests on to the run's base URL. So the gateway records them like those of any other agent.
"""

import asyncio
import copy
import itertools
import os
from collections.abc import Sequence
from typing import Any

from kit.errors import ConfigError
from trainer.errors import Unsupported
from trainer.harness.environments.environment import Split, hold_out
from trainer.harness.environments.verifiers import KEY_VARIABLE, _cannot_load
from trainer.harness.llm import Llm
from trainer.harness.types import Example, Outcome, WorkflowRun
from trainer.harness.workflow_config import VerifiersConfig


class TasksetEnvironment:
    """A taskset with one agent. `workflow.args` is the block `env` of a config of `verifiers`."""

    def __init__(self, config: VerifiersConfig) -> None:
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        self._config = config
        try:
            settings = resolve_env_config(_settings(config))
            self._environment = load_environment(settings)
        except Exception as exc:  # any error of the environment's own code
            raise _cannot_load(config, exc) from exc
        agents = list(agent_config_fields(settings))
        if len(agents) != 1:
            raise Unsupported(
                f"The environment `{config.env}` has the agents `{', '.join(agents)}`",
                hint="Use an environment with one agent: a trajectory has one reward",
            )
        self._serving: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._done = asyncio.Event()
        self._examples: list[Example] | None = None

    def examples(self, split: Split) -> list[Example]:
        if self._examples is None:
            self._examples = self._load()
        return hold_out(self._examples, self._config.validation_examples, split, self._config.env)

    def _load(self) -> list[Example]:
        taskset, limit = self._environment.taskset, self._config.max_examples
        if limit is None and not taskset.bounded:
            raise ConfigError(
                f"The taskset `{self._config.env}` is endless", hint="Set `workflow.max_examples`"
            )
        examples = []
        for task in itertools.islice(taskset, limit):
            data = task.data
            row = {"task": task, **data.model_dump()}
            examples.append(Example(str(data.idx), data.prompt_text, row.get("answer"), row))
        return examples

    async def run(self, example: Example, llm: Llm) -> Outcome:
        from verifiers.v1 import EvalClientConfig, ModelContext, Sampling

        await self._serve()
        os.environ[KEY_VARIABLE] = llm.api_key
        client = EvalClientConfig(base_url=llm.base_url, api_key_var=KEY_VARIABLE)
        sampling = Sampling(**llm.config.sampling)
        context = ModelContext(model=llm.model, client=client, sampling=sampling)
        episode = await self._environment.run_episode(example.row["task"], context)
        for error in [*episode.errors, *(e for trace in episode.traces for e in trace.errors)]:
            if not episode.ok:
                raise RuntimeError(f"the episode failed: {error.type}: {error.message}")
        (trace,) = episode.traces
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        rewards = {name: one.value for name, one in trace.rewards.items() if one is not None}
        return Outcome(trace.last_reply, {**metrics, **rewards, "reward": trace.reward})

    async def score(self, runs: Sequence[WorkflowRun]) -> list[Any]:
        return [run.state for run in runs]

    async def _serve(self) -> None:
        """Start what all runs share: the proxy and tool servers.

        One task starts and ends them, because their cancel scopes belong to a task.
        """
        if self._serving is None:

            async def serve() -> None:
                try:
                    async with self._environment.serving():
                        self._ready.set()
                        await self._done.wait()
                finally:
                    self._ready.set()

            self._serving = asyncio.create_task(serve())
        await self._ready.wait()
        if self._serving.done():
            self._serving.result()  # raises its error

    async def close(self) -> None:
        self._done.set()
        if self._serving is not None:
            await self._serving


def _settings(config: VerifiersConfig) -> dict[str, Any]:
    """Return the environment's settings, with defaults that need no account and no sandbox."""
    settings = copy.deepcopy(config.args)
    settings["taskset"] = {**settings.get("taskset", {}), "id": config.env}
    agent = settings.setdefault("agent", {})
    agent.setdefault("runtime", {"type": "subprocess"})
    # The default of `verifiers` lets the model run any command on this machine.
    agent.setdefault("harness", {"id": "null"})
    return settings
