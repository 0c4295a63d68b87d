"""Reads back a rollout, which an agent records by using the base URL `/rollouts/ID/v1`.

The base URL is the only change to the agent, whatever its framework. Afterwards `GET /rollouts/ID`
returns every call with its messages; `trainer.client` turns them into a trajectory.
"""

from fastapi import APIRouter

from kit.types import Json
from trainer.errors import NotFound
from trainer.server.backend import Backend


def routes(backend: Backend) -> APIRouter:
    router = APIRouter()

    @router.get("/rollouts/{rollout}")
    async def choices(rollout: str) -> Json:
        completions = backend.rollouts.read(rollout)
        if not completions:
            raise NotFound(
                f"Nothing was sampled in rollout `{rollout}`",
                hint=f"Point the agent at `/rollouts/{rollout}/v1`",
            )
        return {
            "rollout": rollout,
            # Their tokens identify the ledger entries, which hold the exact prompts.
            "choices": [
                {**choice, "policy_step": completion["policy_step"]}
                for completion in completions
                for choice in completion["choices"]
            ],
            "completions": completions,
        }

    return router
