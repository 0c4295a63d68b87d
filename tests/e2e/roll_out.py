"""Request completions through the tunnel; each must arrive complete.

    OPENAI_BASE_URL=... python tests/e2e/roll_out.py MODEL AT_ONCE TOKENS DIRECTORY

Keeps AT_ONCE requests in flight until the file DIRECTORY/calm exists, and then one, which leaves
the cores to what else happens. Ends when DIRECTORY/enough exists and all are answered. Prints one
JSON object: the number of answers, of their choices, and of finished choices.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import httpx


async def roll_out(model: str, at_once: int, tokens: int, directory: Path) -> dict[str, int]:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "max_tokens": tokens,
        "n": 4,
    }
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    answers: list[list[Any]] = []

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        while not (directory / "enough").exists():
            if (directory / "calm").exists():
                if number > 0:
                    return
                await asyncio.sleep(1)
            answer = await client.post(url, json=body)
            answers.append(answer.raise_for_status().json()["choices"])

    async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
        await asyncio.gather(*(ask(client, number) for number in range(at_once)))
    choices = [choice for answer in answers for choice in answer]
    return {
        "answers": len(answers),
        "choices": len(choices),
        "finished": sum(choice["finish_reason"] in ("stop", "length") for choice in choices),
    }


if __name__ == "__main__":
    model, at_once, tokens, directory = sys.argv[1:]
    counts = asyncio.run(roll_out(model, int(at_once), int(tokens), Path(directory)))
    sys.stdout.write(json.dumps(counts) + "\n")
