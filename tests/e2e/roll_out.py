"""Request completions through the tunnel without a pause; each must arrive complete.

    OPENAI_BASE_URL=... python tests/e2e/roll_out.py MODEL AT_ONCE TOKENS ENOUGH

Keeps AT_ONCE requests in flight until the file ENOUGH exists, then waits for the remaining ones.
Prints one JSON object: the number of answers, of their choices, and of finished choices.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import httpx


async def roll_out(model: str, at_once: int, tokens: int, enough: Path) -> dict[str, int]:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "max_tokens": tokens,
        "n": 4,
    }
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    answers: list[list[Any]] = []

    async def ask(client: httpx.AsyncClient) -> None:
        while not enough.exists():
            answer = await client.post(url, json=body)
            answers.append(answer.raise_for_status().json()["choices"])

    async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
        await asyncio.gather(*(ask(client) for _ in range(at_once)))
    choices = [choice for answer in answers for choice in answer]
    return {
        "answers": len(answers),
        "choices": len(choices),
        "finished": sum(choice["finish_reason"] in ("stop", "length") for choice in choices),
    }


if __name__ == "__main__":
    model, at_once, tokens, enough = sys.argv[1:]
    counts = asyncio.run(roll_out(model, int(at_once), int(tokens), Path(enough)))
    sys.stdout.write(json.dumps(counts) + "\n")
