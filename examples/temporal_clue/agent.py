"""The agent: one call of the model, with one solved puzzle as an example of the format."""

from typing import Any

# A simpler puzzle, without clues that rule options out.
SHOWN = (
    "The murderer was Martin. The axe killed him. He died in the cellar. It happened at tea.\n"
    "Who, weapon, room, time?"
)
SOLVED = "A: Martin\nB: axe\nC: cellar\nD: tea"


async def solve(example: Any, llm: Any, shown: bool = True, max_tokens: int = 24) -> str:
    """Answer one puzzle. Larger sizes need more tokens, but no solved puzzle."""
    messages = [{"role": "user", "content": example.question}]
    if shown:
        messages = [
            {"role": "user", "content": SHOWN},
            {"role": "assistant", "content": SOLVED},
            *messages,
        ]
    message = await llm.chat(messages, max_tokens=max_tokens)
    return str(message["content"])
