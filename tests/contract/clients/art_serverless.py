"""The unmodified `art.ServerlessBackend` of openpipe-art 0.5.18: OPENAI_URL."""

import asyncio
import sys

import art
from art.serverless.backend import ServerlessBackend
from common import BASE, QUESTION, fingerprint, report, reward


async def rollout(model: art.TrainableModel, number: int) -> art.Trajectory:
    answer = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=QUESTION, max_tokens=8
    )
    return art.Trajectory(
        messages_and_choices=[*QUESTION, answer.choices[0]], reward=reward(number)
    )


async def main(openai: str) -> None:
    backend = ServerlessBackend(api_key="any", base_url=f"{openai}/v1")
    model = art.TrainableModel(
        name="serverless", project="contract", base_model=BASE, base_path="art-local"
    )
    await model.register(backend)
    steps = [await model.get_step()]
    fingerprints = [fingerprint(openai, model.get_inference_name())]
    metrics, sampled = {}, []
    for _ in range(3):
        group = art.TrajectoryGroup([await rollout(model, number) for number in range(4)])
        choices = [one.messages_and_choices[-1] for one in group.trajectories]
        sampled.append([choice.model_dump()["token_ids"] for choice in choices])
        result = await backend.train(model, [group], learning_rate=1e-3)
        steps.append(result.step)
        metrics = result.metrics
        fingerprints.append(fingerprint(openai, model.get_inference_name()))
    older = fingerprint(openai, model.get_inference_name(step=1))
    assert all(abs(a - b) < 1e-4 for a, b in zip(older, fingerprints[1], strict=True))
    await model.delete_checkpoints()
    try:
        await backend.train(model, [group], learning_rate=-1.0)
        refused = ""
    except Exception as error:
        refused = str(error)
    told = {"metrics": metrics, "refused": refused, "sampled": sampled}
    report(steps=steps, fingerprints=fingerprints, **told)
    await backend.close()


asyncio.run(main(*sys.argv[1:]))
