"""Reads back a rollout, which an agent records by using the base URL `/rollouts/ID/v1`.

The base URL is the only change to the agent, whatever its framework. Afterwards `GET /rollouts/ID`
returns every call with its messages; `trainer.client` turns them into a trajectory.
"""

import json
from typing import Literal

from fastapi import APIRouter
from fastapi.responses import Response

from kit import json_text
from trainer.errors import NotFound
from trainer.server.backend import Backend


def routes(backend: Backend) -> APIRouter:
    router = APIRouter()

    @router.get("/rollouts/{rollout}")
    async def choices(rollout: str, only: Literal["completions"] | None = None) -> Response:
        recorded = backend.rollouts.read(rollout)
        if not recorded:
            raise NotFound(
                f"Nothing was sampled in rollout `{rollout}`",
                hint=f"Point the agent at `/rollouts/{rollout}/v1`",
            )
        # Sent as they are: they hold an object for each token, and an epoch has many rollouts.
        parts = [f'"rollout": {json.dumps(rollout)}', f'"completions": [{", ".join(recorded)}]']
        if not only:
            # Their tokens identify the ledger entries, which hold the exact prompts.
            answers = [
                {**choice, "policy_step": completion["policy_step"]}
                for completion in map(json.loads, recorded)
                for choice in completion["choices"]
            ]
            parts.append(f'"choices": {json_text.dump(answers).decode()}')
        return Response(f"{{{', '.join(parts)}}}", media_type="application/json")

    return router
