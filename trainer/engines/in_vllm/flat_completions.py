"""Adds a route to `vllm serve` that answers like `/v1/completions`, with plain lists of logprobs.

vLLM's own route builds an object and three texts for each token, which costs more than everything
else that its API process does. vLLM loads this file with `--middleware`, so it imports nothing of
ours. A vLLM without what is imported here has no such route, and the server uses vLLM's own.
"""

import logging
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic_core import to_json

logger = logging.getLogger(__name__)
router = APIRouter()
LOWEST = -9999.0  # vLLM's own value for what JSON cannot say, minus infinity

try:
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.entrypoints.serve.utils.api_utils import with_cancellation
except ImportError as error:
    logger.warning("no `/v1/flat_completions` in this vLLM: %s", error)
else:

    class FlatRequest(CompletionRequest):
        """Asks the engine for flat logprobs, and for text only where a stop string needs it."""

        def to_sampling_params(self, *arguments: Any, **settings: Any) -> Any:
            parameters = super().to_sampling_params(*arguments, **settings)
            parameters.flat_logprobs = True
            parameters.detokenize = bool(parameters.stop)
            return parameters

    class FlatCompletions(OpenAIServingCompletion):
        def request_output_to_completion_response(
            self, results: list[Any], request: FlatRequest, request_id: str, *others: Any
        ) -> dict[str, Any]:
            for output in results[0].outputs:
                self._raise_if_error(output.finish_reason, request_id)
            return {"choices": [choice(output) for output in results[0].outputs]}

    def choice(output: Any) -> dict[str, Any]:
        flat = output.logprobs
        # At each place the sampled token comes before the likeliest ones.
        logprobs = [max(flat.logprobs[start], LOWEST) for start in flat.start_indices]
        return {
            "index": output.index,
            "token_ids": list(output.token_ids),
            "logprobs": {"token_logprobs": logprobs},
            "finish_reason": output.finish_reason,
        }

    @router.post("/v1/flat_completions", response_model=None)
    @with_cancellation
    async def create(request: FlatRequest, raw_request: Request) -> Response:
        completions = object.__new__(FlatCompletions)
        completions.__dict__ = vars(raw_request.app.state.openai_serving_completion)
        answer = await completions.create_completion(request, raw_request)
        if isinstance(answer, dict):
            return Response(to_json(answer), media_type="application/json")
        return JSONResponse(answer.model_dump(), answer.error.code)


class Middleware:
    """Adds the route when the application starts."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            scope["app"].include_router(router)
        await self._app(scope, receive, send)
