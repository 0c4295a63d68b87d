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


def first_logprob(openai_url: str, name: str) -> float:
    """How likely the weights behind `name` find one fixed token: it tells weights apart."""
    body = {"model": name, "messages": QUESTION, "max_tokens": 1, "temperature": 0}
    answer = httpx.post(f"{openai_url}/v1/chat/completions", json=body, timeout=60)
    answer.raise_for_status()
    return float(answer.json()["choices"][0]["logprobs"]["content"][0]["logprob"])
