"""`trainer.client.ArtBackend` with openpipe-art 0.5.18: CONTROL_URL OPENAI_URL."""

import asyncio
import sys

import art
from art.types import TrainSFTConfig
from common import BASE, QUESTION, fingerprint, report, reward

from trainer.client import ArtBackend
from trainer.errors import TrainerError


async def rollout(model: art.TrainableModel, number: int) -> art.Trajectory:
    answer = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=QUESTION, max_tokens=8
    )
    return art.Trajectory(
        messages_and_choices=[*QUESTION, answer.choices[0]], reward=reward(number)
    )


async def main(control: str, openai: str) -> None:
    assert "torch" not in sys.modules
    backend = ArtBackend(control)
    model = art.TrainableModel(
        name="backend", project="contract", base_model=BASE, base_path="art-local"
    )
    await model.register(backend)
    names, fingerprints, steps = [model.get_inference_name()], [], [await model.get_step()]
    for _ in range(3):
        group = art.TrajectoryGroup([await rollout(model, number) for number in range(4)])
        result = await backend.train(
            model,
            [group],
            learning_rate=1e-3,
            loss_fn="ppo",
            loss_fn_config=None,
            normalize_advantages=False,
            adam_params=None,
            kl_penalty_coef=0.01,
            save_checkpoint=True,
        )
        await model.log([group], metrics=result.metrics, step=result.step, split="train")
        names.append(model.get_inference_name())
        steps.append(result.step)
    fingerprints = [fingerprint(openai, name) for name in names]
    lesson = art.Trajectory(messages_and_choices=[*QUESTION, {"role": "assistant", "content": "a"}])
    config = TrainSFTConfig(learning_rate=[1e-2, 1e-2, 1e-2], batch_size=1)
    losses = [
        row["loss/train"] async for row in backend._train_sft(model, [lesson] * 3, config, {})
    ]
    await model.train_sft([lesson], config=TrainSFTConfig(learning_rate=1e-3))
    names.append(model.get_inference_name())
    await model.delete_checkpoints(best_checkpoint_metric="train/reward")
    refused = {}
    for setting in ({"colour": "blue"}, {"learning_rate": -1.0}, {"loss_fn": "dpo"}):
        try:
            await backend.train(model, [group], **setting)
        except TrainerError as error:
            refused[next(iter(setting))] = error.message
    report(steps=steps, names=names, losses=losses, fingerprints=fingerprints, refused=refused)
    await backend.close()


asyncio.run(main(*sys.argv[1:]))
