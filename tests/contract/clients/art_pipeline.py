"""`PipelineTrainer` of openpipe-art 0.5.18 and 0.5.23 with evals: CONTROL_URL OPENAI_URL.

It samples while it trains; the script counts the chats that were answered during a step, and
measures for how long there was one during a step. 0.5.18 has no `run_name`, and its own
`ServerlessBackend` does not take the settings that its `PipelineTrainer` sends.
"""

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import art
from art.pipeline_trainer import PipelineTrainer
from art.serverless.backend import ServerlessBackend
from common import BASE, QUESTION, fingerprint, report, reward

from trainer.client import ArtBackend

STEPS = 3
NEWEST = "run_name" in art.TrainableModel.model_fields


class Overlap:
    """Counts the chats that begin and are answered during one train call of `backend`."""

    def __init__(self, backend: Any) -> None:
        self.chats = 0
        self.seconds = 0.0
        """How long at least one chat was under way during a train call."""
        self._call: object = None
        self._under_way = 0
        self._since = time.monotonic()
        self._backend = backend
        self._train = backend.train
        backend.train = self._counted

    async def _counted(self, *arguments: Any, **settings: Any) -> Any:
        self._add()
        self._call = object()
        try:
            return await self._train(*arguments, **settings)
        finally:
            self._add()
            self._call = None

    @contextmanager
    def chat(self) -> Iterator[None]:
        self._add()
        self._under_way += 1
        call = self._call
        try:
            yield
        finally:
            self._add()
            self._under_way -= 1
        self.chats += call is not None and call is self._call

    def _add(self) -> None:
        now = time.monotonic()
        self.seconds += now - self._since if self._call and self._under_way else 0.0
        self._since = now

    def stop(self) -> None:
        self._backend.train = self._train


async def rollout(model: art.TrainableModel, number: int) -> art.Trajectory:
    answer = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=QUESTION, max_tokens=8
    )
    return art.Trajectory(
        messages_and_choices=[*QUESTION, answer.choices[0]], reward=reward(number)
    )


def named(name: str, lora: Any) -> dict[str, Any]:
    return {"name": "pipeline", "run_name": name, "lora_config": lora} if NEWEST else {"name": name}


def settings() -> dict[str, Any]:
    pipeline = {
        "num_rollout_workers": 2, "min_batch_size": 1, "max_batch_size": 1, "queue_maxsize": 2
    }  # fmt: skip
    if not NEWEST:
        return pipeline
    from art.pipeline_trainer import PipelineRuntimeConfig

    penalty = {"kl_penalty_coef": 0.05, "kl_penalty_step_lag": 2}
    return {"pipeline": PipelineRuntimeConfig(**pipeline), **penalty}


async def train(backend: Any, name: str, openai: str, lora: Any) -> dict[str, object]:
    model = art.TrainableModel(
        **named(name, lora), project="contract", base_model=BASE, base_path="art-local"
    )
    await model.register(backend)
    evaluated = {}
    overlap = Overlap(backend)

    async def group(model: Any, scenario: Any, config: Any) -> art.TrajectoryGroup:
        made = []
        for number in range(2):
            with overlap.chat():
                made.append(await rollout(model, number))
        return art.TrajectoryGroup(made)

    async def evaluate(model: Any, step: int, config: Any) -> list[art.Trajectory]:
        evaluated[step] = model.get_inference_name()
        return [await rollout(model, 1)]

    trainer = PipelineTrainer(
        model=model,
        backend=backend,
        rollout_fn=group,
        scenarios=[{"metadata": {"scenario_id": number}} for number in range(64)],
        config=None,
        eval_fn=evaluate,
        learning_rate=1e-3,
        max_steps=STEPS,
        eval_every_n_steps=1,
        log_interval_seconds=600,
        **settings(),
    )
    before = fingerprint(openai, model.get_inference_name())
    began = time.monotonic()
    await trainer.train(handle_signals=False)
    wall = time.monotonic() - began
    overlap.stop()
    result = {
        "step": await model.get_step(),
        "answered_during_steps": overlap.chats,
        "both_share": overlap.seconds / wall,
        "wall_s": wall,
        "evaluated": evaluated,
        "completed": sorted(trainer.state.completed_eval_steps),
        "fingerprints": [before, fingerprint(openai, model.get_inference_name())],
    }
    await backend.close()
    return result


async def refused(openai: str) -> str:
    """Return the error of the client itself, where it cannot use its own backend."""
    backend = ServerlessBackend(api_key="any", base_url=f"{openai}/v1")
    error = ""
    try:
        await train(backend, "pipeline-refused", openai, None)
    except* TypeError as errors:
        error = str(errors.exceptions[0])
    await backend.close()
    return error


async def main(control: str, openai: str) -> None:
    if NEWEST:
        serverless = ServerlessBackend(api_key="any", base_url=f"{openai}/v1")
        report(
            serverless=await train(serverless, "pipeline-serverless", openai, None),
            backend=await train(ArtBackend(control), "pipeline-backend", openai, {"rank": 2}),
        )
    else:
        report(
            refused=await refused(openai),
            backend=await train(ArtBackend(control), "pipeline-0-5-18", openai, None),
        )


asyncio.run(main(*sys.argv[1:]))
