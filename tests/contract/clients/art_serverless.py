"""The unmodified `art.ServerlessBackend` of openpipe-art 0.5.18: OPENAI_URL."""

import asyncio
import sys

import art
from art.serverless.backend import ServerlessBackend
from common import BASE, QUESTION, first_logprob, reward, tell


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
    logprobs, steps = [first_logprob(openai, model.get_inference_name())], [await model.get_step()]
    metrics = {}
    for _ in range(3):
        group = art.TrajectoryGroup([await rollout(model, number) for number in range(4)])
        result = await backend.train(model, [group], learning_rate=1e-3)
        steps.append(result.step)
        metrics = result.metrics
        logprobs.append(first_logprob(openai, model.get_inference_name()))
    assert abs(first_logprob(openai, model.get_inference_name(step=1)) - logprobs[1]) < 1e-4
    await model.delete_checkpoints()
    try:
        await backend.train(model, [group], learning_rate=-1.0)
        refused = ""
    except Exception as error:
        refused = str(error)
    tell(steps=steps, logprobs=logprobs, metrics=metrics, refused=refused)
    await backend.close()


asyncio.run(main(*sys.argv[1:]))
