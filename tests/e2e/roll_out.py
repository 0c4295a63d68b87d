"""Many completions at once through the tunnel, each of which must come back whole.

    OPENAI_BASE_URL=... python tests/e2e/roll_out.py MODEL REQUESTS TOKENS

Prints one JSON object: how many choices came, and how many of them finished.
"""

import asyncio
import json
import os
import sys

import httpx


async def roll_out(model: str, requests: int, tokens: int) -> dict[str, object]:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "max_tokens": tokens,
        "n": 4,
    }
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
        answers = await asyncio.gather(*(client.post(url, json=body) for _ in range(requests)))
    choices = [
        choice for answer in answers for choice in answer.raise_for_status().json()["choices"]
    ]
    return {
        "answers": len(answers),
        "choices": len(choices),
        "finished": sum(choice["finish_reason"] in ("stop", "length") for choice in choices),
    }


if __name__ == "__main__":
    model, requests, tokens = sys.argv[1:]
    sys.stdout.write(json.dumps(asyncio.run(roll_out(model, int(requests), int(tokens)))) + "\n")
