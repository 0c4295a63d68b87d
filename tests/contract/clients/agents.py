"""Train one framework's agent with a tool on its rollouts: FRAMEWORK CONTROL_URL OPENAI_URL.

The agent only receives a base URL, `/rollouts/ID/v1`. Its completions are read back from there.
"""

import asyncio
import importlib
import sys
from typing import Any

import art
import httpx
from common import BASE, report

from trainer.client import ArtBackend

QUESTION = "What is 2 + 3?"


def trajectory(openai: str, rollout: str, reward: float) -> art.Trajectory:
    choices = (
        httpx.get(f"{openai}/rollouts/{rollout}", timeout=60).raise_for_status().json()["choices"]
    )
    return art.Trajectory(
        messages_and_choices=[{"role": "user", "content": QUESTION}, *map(_choice, choices)],
        reward=reward,
        metrics={"turns": len(choices)},
    )


def _choice(choice: dict[str, Any]) -> Any:
    from openai.types.chat.chat_completion import Choice

    return Choice.model_validate(choice)


async def main(framework: str, control: str, openai: str) -> None:
    agent = importlib.import_module(f"agent_{framework}")
    backend = ArtBackend(control)
    model = art.TrainableModel(
        name=framework, project="contract", base_model=BASE, base_path="art-local"
    )
    await model.register(backend)
    results, answers = [], []
    for step in range(2):
        group = []
        for number in range(2):
            rollout = f"{framework}-{step}-{number}"
            name = model.get_inference_name()
            answer = await agent.ask(QUESTION, f"{openai}/rollouts/{rollout}/v1", name)
            answers.append(answer)
            group.append(trajectory(openai, rollout, reward=float("5" in answer)))
        results.append(await backend.train(model, [art.TrajectoryGroup(group)], learning_rate=1e-3))
    report(
        answers=answers,
        turns=[t.metrics["turns"] for t in group],
        steps=[result.step for result in results],
        metrics=results[-1].metrics,
        calls=agent.calls,
    )
    await backend.close()


asyncio.run(main(*sys.argv[1:]))
