"""An agent rewarded for its share of lowercase letters, which even random weights produce."""

from typing import Any


async def answer(example: Any, llm: Any) -> str:
    message = await llm.chat([{"role": "user", "content": example.question}], max_tokens=12)
    return str(message["content"])


def score(run: Any) -> float:
    text = str(run.output)
    return sum(letter.islower() for letter in text) / max(len(text), 1)
