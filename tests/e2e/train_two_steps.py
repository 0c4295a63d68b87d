"""A user's training script: two steps over HTTP with the real openpipe-art client.

    ART_BASE_URL=... OPENAI_BASE_URL=... python tests/e2e/train_two_steps.py PROJECT NAME BASE_PATH

Prints the steps and their gradient norms as JSON.
"""

import asyncio
import json
import os
import sys
from typing import Any

from art import TrainableModel, Trajectory, TrajectoryGroup

from trainer.client import ArtBackend


async def rollout(model: Any, client: Any, reward: float) -> Trajectory:
    messages: Any = [{"role": "user", "content": "Say yes or no."}]
    completion = await client.chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_tokens=8, logprobs=True
    )
    return Trajectory(messages_and_choices=[*messages, completion.choices[0]], reward=reward)


async def train(project: str, name: str, base_path: str) -> list[dict[str, float]]:
    backend = ArtBackend(os.environ["ART_BASE_URL"])
    model: TrainableModel[Any, Any] = TrainableModel(
        name=name, project=project, base_model="tiny-random", base_path=base_path
    )
    await model.register(backend)
    # The server reports its own port, but the tunnel's local port may differ.
    model.inference_base_url = os.environ["OPENAI_BASE_URL"]
    client = model.openai_client()
    steps = []
    for _ in range(2):
        group = TrajectoryGroup([await rollout(model, client, float(i % 2)) for i in range(4)])
        result = await backend.train(model, [group], learning_rate=1e-3)
        steps.append({"step": result.step, "grad_norm": result.metrics["loss/grad_norm"]})
    await backend.close()
    return steps


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(train(*sys.argv[1:]))) + "\n")
