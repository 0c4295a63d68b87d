"""Samples whole choices from an engine, and compares them."""

from typing import Any

from trainer.engines.engine import Delta, Engine, SampleRequest

# Difference between two implementations of the same fp32 arithmetic: 24 tokens, 4 layers.
BOUND = 1e-4
PROMPT = [256, 257, *b"user\nhi", 258, 10, 257, *b"assistant\n"]
PROMPTS = [PROMPT, [257, *b"user\nWhat is the capital of France?"], [*range(40, 120)], [7]]


async def sample(engine: Engine, **request: Any) -> list[Delta]:
    """Return every choice as one delta."""
    choices: dict[int, Delta] = {}
    async for delta in engine.sample(SampleRequest(**{"prompt_ids": PROMPT, **request})):
        choices.setdefault(delta.index, Delta(delta.index)).extend(delta)
    return [choice for _, choice in sorted(choices.items())]


def differences(one: Delta, other: Delta) -> list[float]:
    return [abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True)]
