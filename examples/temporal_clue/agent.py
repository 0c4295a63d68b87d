"""The agent: one call of the model, after one solved puzzle that shows the form of an answer."""

from typing import Any

# A smaller puzzle, without the clues that rule options out.
SHOWN = (
    "The murderer was Martin. The axe killed him. He died in the cellar. It happened at tea.\n"
    "Who, weapon, room, time?"
)
SOLVED = "A: Martin\nB: axe\nC: cellar\nD: tea"


async def solve(example: Any, llm: Any, shown: bool = True, max_tokens: int = 24) -> str:
    """Answer one puzzle. The larger sizes need no example but more tokens."""
    messages = [{"role": "user", "content": example.question}]
    if shown:
        messages = [
            {"role": "user", "content": SHOWN},
            {"role": "assistant", "content": SOLVED},
            *messages,
        ]
    message = await llm.chat(messages, max_tokens=max_tokens)
    return str(message["content"])
