"""Tasksets of `verifiers` 0.4: tasks that an agent program solves, each with its own rewards.

The program runs as a process of this machine and talks to a proxy of `verifiers`, which passes its
requests on to the run's base URL. So the gateway records them like those of any other agent.
"""

import asyncio
import copy
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kit.errors import ConfigError
from trainer.errors import Unsupported
from trainer.harness.environments.environment import Split, hold_out
from trainer.harness.environments.verifiers import KEY_VARIABLE, cannot_load
from trainer.harness.llm import Llm
from trainer.harness.types import Example, Outcome, WorkflowRun
from trainer.harness.workflow_config import VerifiersConfig

_RUNS_OF_A_PROXY = 1000  # it is started again then, because it keeps a client for every run


@dataclass(frozen=True)
class TaskExample(Example):
    """An example with the live task that it was made from."""

    task: Any
    """Outside the row: results know an example again by its row, also in another process."""


class TasksetEnvironment:
    """A taskset with one agent. `workflow.args` is the block `env` of a config of `verifiers`."""

    def __init__(self, config: VerifiersConfig) -> None:
        self._config = config
        try:
            from verifiers.v1.utils.loaders import load_environment, resolve_env_config

            agents = _agents(config)
            if len(agents) == 1:
                settings = resolve_env_config(_settings(config, agents[0]))
                self._environment = load_environment(settings)
        except Exception as exc:  # any error of the environment's own code
            raise cannot_load(config, exc) from exc
        if len(agents) != 1:
            raise Unsupported(
                f"The environment `{config.env}` has the agents `{', '.join(agents)}`",
                hint="Use an environment with one agent: a trajectory has one reward",
            )
        self._serving: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._done = asyncio.Event()
        self._active = self._runs = 0
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
        examples: list[Example] = []
        for task in itertools.islice(taskset, limit):
            data, row = task.data, task.data.model_dump()
            name, question = str(data.idx), data.prompt_text
            examples.append(TaskExample(name, question, row.get("answer"), row, task))
        return examples

    async def run(self, example: Example, llm: Llm) -> Outcome:
        from verifiers.v1 import EvalClientConfig, ModelContext, Sampling

        assert isinstance(example, TaskExample)  # made by `examples`
        os.environ[KEY_VARIABLE] = llm.api_key
        client = EvalClientConfig(base_url=llm.base_url, api_key_var=KEY_VARIABLE)
        sampling = Sampling(**llm.config.sampling)
        context = ModelContext(model=llm.model, client=client, sampling=sampling)
        self._active += 1
        try:
            await self._serve()
            episode = await self._environment.run_episode(example.task, context)
            await self._forget(client)
        finally:
            self._active -= 1
        if self._runs >= _RUNS_OF_A_PROXY and not self._active:
            await self._stop()
        if not episode.ok:
            traces = [error for trace in episode.traces for error in trace.errors]
            error = [*traces, *episode.errors][-1]
            raise RuntimeError(f"the episode failed: {error.type}: {error.message}")
        (trace,) = episode.traces
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        scores = {name: one.score for name, one in trace.rewards.items() if one is not None}
        return Outcome(trace.last_reply, {**metrics, **scores, "reward": trace.reward})

    async def score(self, runs: Sequence[WorkflowRun]) -> list[Any]:
        return [run.state for run in runs]

    async def _serve(self) -> None:
        """Start what all runs share: the proxy and tool servers.

        One task starts and ends them, because their cancel scopes belong to a task.
        """
        self._runs += 1
        if self._serving is None:
            self._ready, self._done = asyncio.Event(), asyncio.Event()
            self._serving = asyncio.create_task(self._serve_until_done(self._ready, self._done))
        serving = self._serving
        await self._ready.wait()
        if serving.done():
            serving.result()  # raises its error

    async def _serve_until_done(self, ready: asyncio.Event, done: asyncio.Event) -> None:
        try:
            async with self._environment.serving():
                ready.set()
                await done.wait()
        finally:
            ready.set()

    async def _forget(self, config: Any) -> None:
        """Close the proxy's connections to one run's base URL, which it would keep for ever."""
        proxy = self._environment._interception
        for server in getattr(proxy, "servers", [proxy]):
            if client := getattr(server, "clients", {}).pop(config.model_dump_json(), None):
                await client.close()

    async def _stop(self) -> None:
        serving, self._serving, self._runs = self._serving, None, 0
        self._done.set()
        if serving is not None:
            await serving

    async def close(self) -> None:
        await self._stop()


def _agents(config: VerifiersConfig) -> list[str]:
    """Return the names of the environment's agents."""
    from verifiers.v1 import AgentConfig
    from verifiers.v1.utils.loaders import env_config_type

    kind = env_config_type(config.env, config.args.get("id", ""))
    fields = kind.model_fields.items()
    return [name for name, field in fields if isinstance(field.default, AgentConfig)]


def _settings(config: VerifiersConfig, agent: str) -> dict[str, Any]:
    """Return the environment's settings, with defaults that need no account and no sandbox."""
    settings = copy.deepcopy(config.args)
    settings["taskset"] = {**settings.get("taskset", {}), "id": config.env}
    own = settings.setdefault(agent, {})
    own.setdefault("runtime", {"type": "subprocess"})
    # The default of `verifiers` lets the model run any command on this machine.
    own.setdefault("harness", {"id": "null"})
    return settings
