"""`PipelineTrainer` of openpipe-art 0.5.23 with evals, on both backends: CONTROL_URL OPENAI_URL.

It samples while it trains; the script counts the chats that were answered during a step.
"""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import art
from art.pipeline_trainer import PipelineRuntimeConfig, PipelineTrainer
from art.serverless.backend import ServerlessBackend
from common import BASE, QUESTION, fingerprint, report, reward

from trainer.client import ArtBackend

STEPS = 3


class Overlap:
    """Counts the chats that begin and are answered during one train call of `backend`."""

    def __init__(self, backend: Any) -> None:
        self.chats = 0
        self._call: object = None
        self._backend = backend
        self._train = backend.train
        backend.train = self._counted

    async def _counted(self, *arguments: Any, **settings: Any) -> Any:
        self._call = object()
        try:
            return await self._train(*arguments, **settings)
        finally:
            self._call = None

    @contextmanager
    def chat(self) -> Iterator[None]:
        call = self._call
        yield
        self.chats += call is not None and call is self._call

    def stop(self) -> None:
        self._backend.train = self._train


async def rollout(model: art.TrainableModel, number: int) -> art.Trajectory:
    answer = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=QUESTION, max_tokens=8
    )
    return art.Trajectory(
        messages_and_choices=[*QUESTION, answer.choices[0]], reward=reward(number)
    )


async def train(backend: Any, name: str, openai: str, lora: Any) -> dict[str, object]:
    model = art.TrainableModel(
        name="pipeline",
        run_name=name,
        project="contract",
        base_model=BASE,
        base_path="art-local",
        lora_config=lora,
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
        pipeline=PipelineRuntimeConfig(
            num_rollout_workers=2, min_batch_size=1, max_batch_size=1, queue_maxsize=2
        ),
        learning_rate=1e-3,
        kl_penalty_coef=0.05,
        kl_penalty_step_lag=2,
        max_steps=STEPS,
        eval_every_n_steps=1,
        log_interval_seconds=600,
    )
    before = fingerprint(openai, model.get_inference_name())
    await trainer.train(handle_signals=False)
    overlap.stop()
    result = {
        "step": await model.get_step(),
        "answered_during_steps": overlap.chats,
        "evaluated": evaluated,
        "completed": sorted(trainer.state.completed_eval_steps),
        "fingerprints": [before, fingerprint(openai, model.get_inference_name())],
    }
    await backend.close()
    return result


async def main(control: str, openai: str) -> None:
    serverless = ServerlessBackend(api_key="any", base_url=f"{openai}/v1")
    report(
        serverless=await train(serverless, "pipeline-serverless", openai, None),
        backend=await train(ArtBackend(control), "pipeline-backend", openai, {"rank": 2}),
    )


asyncio.run(main(*sys.argv[1:]))
