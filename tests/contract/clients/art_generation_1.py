"""`art.Backend` of openpipe-art 0.5.0 over HTTP: CONTROL_URL OPENAI_URL."""

import asyncio
import sys

import art
from common import BASE, QUESTION, fingerprint, report, reward


async def rollout(model: art.TrainableModel, number: int) -> art.Trajectory:
    answer = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=QUESTION, max_tokens=8
    )
    return art.Trajectory(
        messages_and_choices=[*QUESTION, answer.choices[0]],
        reward=reward(number),
        metrics={"length": len(answer.choices[0].message.content or "")},
    )


async def main(control: str, openai: str) -> None:
    backend = art.Backend(base_url=control)
    model = art.TrainableModel(name="generation-1", project="contract", base_model=BASE)
    await model.register(backend)
    fingerprints, steps = [fingerprint(openai, model.name)], [await model.get_step()]
    sampled = []
    for _ in range(3):
        group = await art.gather_trajectory_groups(
            [art.TrajectoryGroup(rollout(model, number) for number in range(4))]
        )
        choices = [one.messages_and_choices[-1] for one in group[0].trajectories]
        sampled.append([choice.model_dump()["token_ids"] for choice in choices])
        await model.log(group, split="val")
        await model.train(group, config=art.TrainConfig(learning_rate=1e-3, beta=0.01))
        steps.append(await model.get_step())
        fingerprints.append(fingerprint(openai, model.name))
    await model.delete_checkpoints()
    fork = art.TrainableModel(name="generation-1-fork", project="contract", base_model=BASE)
    await backend._experimental_fork_checkpoint(fork, from_model=model.name)
    found = fingerprint(openai, fork.name)
    report(steps=steps, fingerprints=fingerprints, fork=found, sampled=sampled)
    await backend.close()


asyncio.run(main(*sys.argv[1:]))
