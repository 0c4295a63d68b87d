"""What the client scripts share. Each runs in its own environment, so only httpx is sure."""

import json
import sys
from typing import Any

import httpx

BASE = "tiny-random"
QUESTION = [{"role": "user", "content": "Say something"}]


def reward(number: int) -> float:
    """Rewards that differ within every group."""
    return float(number % 2)


def tell(**result: Any) -> None:
    """The script's result, for the test that ran it."""
    sys.stdout.write(json.dumps(result) + "\n")


def fingerprint(openai_url: str, name: str) -> list[float]:
    """Logprobs of the likeliest first token after eight questions: they tell weights apart.

    A step may hardly move one of them, by chance; it never leaves all eight where they were.
    """
    found = []
    for number in range(8):
        question = {"role": "user", "content": f"Say something about {number}"}
        body = {"model": name, "messages": [question], "max_tokens": 1, "temperature": 0}
        answer = httpx.post(f"{openai_url}/v1/chat/completions", json=body, timeout=60)
        answer.raise_for_status()
        found.append(float(answer.json()["choices"][0]["logprobs"]["content"][0]["logprob"]))
    return found
