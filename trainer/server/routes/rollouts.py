"""A rollout's own base URL, `/rollouts/ID/v1`, and what was said under it.

An agent of any framework is pointed at that URL and nothing else of it is touched; afterwards
`GET /rollouts/ID` gives its choices, which are what a trajectory is made of, and with each the
messages that it answered.
"""

from fastapi import APIRouter

from kit.types import Json
from trainer.errors import NotFound
from trainer.server.backend import Backend


def routes(backend: Backend) -> APIRouter:
    router = APIRouter()

    @router.get("/rollouts/{rollout}")
    async def choices(rollout: str) -> Json:
        said = backend.rollouts.read(rollout)
        if not said:
            raise NotFound(
                f"Nothing was sampled in rollout `{rollout}`",
                hint=f"Point the agent at `/rollouts/{rollout}/v1`",
            )
        return {
            "rollout": rollout,
            # Their tokens lead back to the ledger, and with them to the exact prompt.
            "choices": [
                {**choice, "policy_step": one["policy_step"]}
                for one in said
                for choice in one["choices"]
            ],
            "completions": said,
        }

    return router
