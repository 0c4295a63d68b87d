"""A training script that can be interrupted: it asks the server which step the run has reached.

    ART_BASE_URL=... OPENAI_BASE_URL=... python tests/e2e/train_until.py NAME STEPS SECONDS

Trains NAME with the real openpipe-art client until it has STEPS steps, at least SECONDS apart.
"""

import asyncio
import os
import sys
import tempfile
from typing import Any

from art import TrainableModel, Trajectory, TrajectoryGroup

from trainer.client import ArtBackend


async def rollout(model: Any, client: Any, number: int) -> Trajectory:
    messages: Any = [{"role": "user", "content": "Say yes or no."}]
    completion = await client.chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_tokens=32, logprobs=True
    )
    return Trajectory(
        messages_and_choices=[*messages, completion.choices[0]], reward=float(number % 2)
    )


async def train(name: str, steps: int, seconds: float) -> None:
    backend = ArtBackend(os.environ["ART_BASE_URL"])
    model: TrainableModel[Any, Any] = TrainableModel(
        name=name, project="e2e", base_model="tiny-random", base_path=tempfile.mkdtemp()
    )
    await model.register(backend)
    model.inference_base_url = os.environ["OPENAI_BASE_URL"]
    client = model.openai_client()
    while (step := await model.get_step()) < steps:
        sys.stdout.write(f"goes on from step {step}\n")
        sys.stdout.flush()
        group = TrajectoryGroup(
            await asyncio.gather(*(rollout(model, client, i) for i in range(8)))
        )
        await backend.train(model, [group], learning_rate=1e-3)
        await asyncio.sleep(seconds)
    await backend.close()


if __name__ == "__main__":
    asyncio.run(train(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
