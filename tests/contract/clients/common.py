"""Helpers for the client scripts. Their environments have only httpx in common."""

import json
import sys
from typing import Any

import httpx

BASE = "tiny-random"
QUESTION = [{"role": "user", "content": "Say something"}]


def reward(number: int) -> float:
    """Return a reward that differs within every group."""
    return float(number % 2)


def report(**result: Any) -> None:
    """Print the script's result as JSON for the test that runs it."""
    sys.stdout.write(json.dumps(result) + "\n")


def fingerprint(openai_url: str, name: str) -> list[float]:
    """Return the logprobs of the likeliest first token after eight questions.

    They distinguish weights: a step may by chance barely change one of them, but never all eight.
    """
    logprobs = []
    for number in range(8):
        question = {"role": "user", "content": f"Say something about {number}"}
        body = {"model": name, "messages": [question], "max_tokens": 1, "temperature": 0}
        answer = httpx.post(f"{openai_url}/v1/chat/completions", json=body, timeout=60)
        answer.raise_for_status()
        logprobs.append(float(answer.json()["choices"][0]["logprobs"]["content"][0]["logprob"]))
    return logprobs
