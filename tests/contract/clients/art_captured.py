"""Trajectories that openpipe-art 0.5.23 records by itself, of every API: CONTROL_URL OPENAI_URL."""

import asyncio
import sys
from typing import Any

import art
import httpx
from art.gather import record_trajectory_completion_tokens
from common import BASE, QUESTION, fingerprint, report, reward
from openai import AsyncOpenAI

from trainer.client import ArtBackend
from trainer.errors import TrainerError


async def chat(client: AsyncOpenAI, name: str) -> None:
    """Two turns of one conversation: each is trained once."""
    messages: list[Any] = list(QUESTION)
    for _ in range(2):
        answer = await client.chat.completions.create(model=name, messages=messages, max_tokens=8)
        said = answer.choices[0].message.content
        messages += [{"role": "assistant", "content": said}, *QUESTION]


async def stream(client: AsyncOpenAI, name: str) -> None:
    chunks = await client.chat.completions.create(
        model=name,
        messages=QUESTION,
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for _ in chunks:
        pass


async def responses(client: AsyncOpenAI, name: str) -> None:
    await client.responses.create(model=name, input="Say something", max_output_tokens=16)


async def completions(client: AsyncOpenAI, name: str) -> None:
    await client.completions.create(model=name, prompt="Say something", max_tokens=8)


async def messages(client: AsyncOpenAI, name: str) -> None:
    # Newer clients of Anthropic use an HTTP library that ART does not record.
    body = {"model": name, "messages": QUESTION, "max_tokens": 8}
    async with httpx.AsyncClient(timeout=60) as http:
        (await http.post(f"{client.base_url}messages", json=body)).raise_for_status()


async def record(calls: Any, client: AsyncOpenAI, name: str, number: int) -> art.Trajectory:
    with art.Trajectory() as trajectory:
        await calls(client, name)
    trajectory.reward = reward(number)
    return trajectory


async def main(control: str, openai: str) -> None:
    backend = ArtBackend(control)
    model = art.TrainableModel(
        name="recorded",
        run_name="captured",
        project="contract",
        base_model=BASE,
        base_path="art-local",
    )
    await model.register(backend)
    client = AsyncOpenAI(base_url=f"{openai}/v1", api_key="any")
    fingerprints, tokens, recorded = [fingerprint(openai, model.get_inference_name())], {}, {}
    for calls in (chat, stream, responses, completions, messages):
        name = model.get_inference_name()
        group = art.TrajectoryGroup(
            [await record(calls, client, name, number) for number in range(2)]
        )
        wire = group.trajectories[0].model_dump(mode="json")
        recorded[calls.__name__] = {kind: len(found) for kind, found in wire["exchanges"].items()}
        for trajectory in group.trajectories:
            record_trajectory_completion_tokens(trajectory)
        result = await backend.train(model, [group], learning_rate=1e-3)
        sampled = sum(trajectory.metrics["completion_tokens"] for trajectory in group.trajectories)
        tokens[calls.__name__] = [sampled, result.metrics["data/step_trainer_tokens"]]
        fingerprints.append(fingerprint(openai, model.get_inference_name()))

    stranger = await record(chat, client, model.get_inference_name(), 1)
    for exchange in stranger.exchanges.chat_completions:  # as another server would answer
        exchange.response.choices[0].logprobs = None
        exchange.response.choices[0].model_extra.clear()
    base = await record(chat, client, f"{BASE}@base", 1)
    refused = []
    for trajectory in (stranger, base):
        try:
            await backend.train(model, [art.TrajectoryGroup([trajectory, art.Trajectory()])])
        except TrainerError as error:
            refused.append(error.message)
    report(fingerprints=fingerprints, tokens=tokens, recorded=recorded, refused=refused)
    await backend.close()


asyncio.run(main(*sys.argv[1:]))
