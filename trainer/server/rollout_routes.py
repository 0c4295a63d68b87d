"""A rollout's own base URL, `/rollouts/ID/v1`, and what was sampled under it.

An agent of any framework is pointed at that URL and nothing else of it is touched; afterwards
`GET /rollouts/ID` gives its choices, which are what a trajectory is made of.
"""

from typing import Any

from fastapi import APIRouter

from trainer.errors import NotFound
from trainer.server.backend import Backend
from trainer.server.ledger import Entry

Json = dict[str, Any]


def routes(backend: Backend) -> APIRouter:
    router = APIRouter()

    @router.get("/rollouts/{rollout}")
    async def choices(rollout: str) -> Json:
        entries = backend.ledger.rollout(rollout)
        if not entries:
            raise NotFound(
                f"Nothing was sampled in rollout `{rollout}`",
                hint=f"Point the agent at `/rollouts/{rollout}/v1`",
            )
        assert backend.tokenizer  # there is no entry before there is a model
        decode = backend.tokenizer.decode
        return {
            "rollout": rollout,
            "choices": [
                _choice(entry, decode(entry.completion_ids, skip_special_tokens=True))
                for entry in entries
            ],
        }

    return router


def _choice(entry: Entry, text: str) -> Json:
    """An ART choice: its tokens lead back to the ledger, and with them to the exact prompt."""
    tokens: list[Json] = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(entry.completion_ids, entry.logprobs, strict=True)
    ]
    return {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": text},
        "logprobs": {"content": tokens, "refusal": None},
        "policy_step": entry.step,
    }
