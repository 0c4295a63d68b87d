"""Measures the parts of a step on a GPU: sampling, training, loading, the rest; random rewards.

    trainer serve --engine vllm --base-model DIR &
    python bench/loop_cuda.py --base-model DIR [--groups 16] [--size 16] [--tokens 512] [--ahead]

Each step samples `groups` groups over the OpenAI API, rewards them at random and trains on them
over ART's protocol, as an agent does, but without an agent's own work.
"""

import argparse
import asyncio
import json
import random
import time
from pathlib import Path

import httpx

from kit.types import Json

Batch = tuple[list[Json], float]
WORDS = ("north", "east", "river", "stone", "candle", "winter", "letter", "garden", "silver")


async def group(client: httpx.AsyncClient, arguments: argparse.Namespace, name: str) -> Json:
    """A group of completions of one prompt, with random rewards."""
    text = " ".join(random.choice(WORDS) for _ in range(arguments.prompt))
    message = {"role": "user", "content": text}
    answer = await client.post(
        f"http://127.0.0.1:{arguments.openai_port}/v1/chat/completions",
        json={
            "model": name,
            "messages": [message],
            "n": arguments.size,
            "max_tokens": arguments.tokens,
            "temperature": 1.0,
            "logprobs": True,
        },
    )
    answer.raise_for_status()
    return {
        "trajectories": [
            {"messages_and_choices": [message, choice], "reward": random.random()}
            for choice in answer.json()["choices"]
        ]
    }


async def sample(client: httpx.AsyncClient, arguments: argparse.Namespace, model: Json) -> Batch:
    """The groups of one step, and the seconds that they took."""
    started = time.monotonic()
    groups = await asyncio.gather(
        *(group(client, arguments, model["name"]) for _ in range(arguments.groups))
    )
    return groups, time.monotonic() - started


async def train(
    client: httpx.AsyncClient, arguments: argparse.Namespace, model: Json, batch: Batch
) -> Json:
    """Run one step and return its times and the server's row of metrics."""
    groups, sample_s = batch
    started = time.monotonic()
    body = {
        "model": model,
        "trajectory_groups": groups,
        "config": {"learning_rate": 1e-5},
        "dev_config": {"packed_sequence_length": arguments.row},
    }
    text = json.dumps(body)  # megabytes, timed separately: the client's time, not the server's
    written = time.monotonic()
    answer = await client.post(
        f"http://127.0.0.1:{arguments.port}/_train_model",
        content=text,
        headers={"content-type": "application/json"},
    )
    if answer.status_code != 200:
        raise SystemExit(answer.text)
    done = time.monotonic()
    path = Path(arguments.state_dir, model["project"], "models", model["name"], "history.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    row = [row for row in rows if "time/step_s" in row][-1]  # not the canary's
    times = {"sample_s": sample_s, "write_s": written - started}
    return {**times, "train_call_s": done - written, "done_at": done, **row}


async def prepare(client: httpx.AsyncClient, arguments: argparse.Namespace) -> Json:
    """Register a model and return it."""
    model = {
        "name": "loop",
        "project": "bench",
        "base_model": arguments.base_model,
        "trainable": True,
    }
    for route, body in (
        ("register", model),
        ("_prepare_backend_for_training", {"model": model, "config": {}}),
    ):
        answer = await client.post(f"http://127.0.0.1:{arguments.port}/{route}", json=body)
        if answer.status_code != 200:
            raise SystemExit(answer.text)
    return model


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-model", required=True)
    parser.add_argument("--state-dir", default=".art")
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=400, help="words in a prompt")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--row", type=int, default=8192, help="tokens in a packed row")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--ahead", action="store_true", help="sample while a step trains")
    parser.add_argument("--port", type=int, default=7999)
    parser.add_argument("--openai-port", type=int, default=8000)
    arguments = parser.parse_args()
    async with httpx.AsyncClient(timeout=900) as client:
        model = await prepare(client, arguments)
        batch = await sample(client, arguments, model)
        for left in reversed(range(arguments.steps)):
            ahead = arguments.ahead and left > 0
            following = asyncio.create_task(sample(client, arguments, model)) if ahead else None
            print(json.dumps(await train(client, arguments, model, batch)), flush=True)
            if left:
                batch = await (following or sample(client, arguments, model))


if __name__ == "__main__":
    asyncio.run(main())
