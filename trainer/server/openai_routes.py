"""The OpenAI-compatible API. Exact tokens and logprobs are always in the answer, asked or not."""

import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pydantic
from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response, StreamingResponse

from trainer.engines.engine import Delta, SampleRequest
from trainer.errors import Unsupported
from trainer.server.backend import Backend

Json = dict[str, Any]

# Values that ask for nothing: clients send them unasked. Anything else is refused by name.
_NEUTRAL: Json = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "top_logprobs": 0,
    "tools": [],
    "response_format": {"type": "text"},
    "store": False,
}
# vLLM's way to ask for what every answer here holds anyway.
_ALWAYS = {"logprobs", "return_token_ids", "return_tokens_as_token_ids"}


class ChatRequest(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")

    model: str
    messages: list[Json] = pydantic.Field(min_length=1)
    n: int = pydantic.Field(1, ge=1, le=256)
    max_tokens: int | None = pydantic.Field(None, ge=1)
    max_completion_tokens: int | None = pydantic.Field(None, ge=1)
    temperature: float | None = pydantic.Field(None, ge=0, le=2)
    top_p: float | None = pydantic.Field(None, gt=0, le=1)
    top_k: int | None = pydantic.Field(None, ge=0)
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = False
    stream_options: Json | None = None

    def sample_request(self) -> SampleRequest:
        for key, value in (self.model_extra or {}).items():
            if key not in _ALWAYS and value is not None and value != _NEUTRAL.get(key, ...):
                raise Unsupported(f"`{key}` is not supported by this engine")
        return SampleRequest(
            messages=self.messages,
            n=self.n,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stream=bool(self.stream),
            seed=self.seed,
        )


class Answer:
    """Collects the deltas of one request and speaks OpenAI's JSON."""

    def __init__(self, model: str) -> None:
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = model
        self.step = 0
        self.prompt_ids: list[int] = []
        self.choices: dict[int, Delta] = {}

    def add(self, step: int, delta: Delta) -> None:
        self.step = step
        self.prompt_ids = self.prompt_ids or delta.prompt_ids
        whole = self.choices.setdefault(delta.index, Delta(delta.index, [], [], ""))
        whole.token_ids += delta.token_ids
        whole.logprobs += delta.logprobs
        whole.text += delta.text
        whole.finish_reason = delta.finish_reason

    def head(self, kind: str) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "policy_step": self.step,
        }

    def usage(self) -> Json:
        completion = sum(len(choice.token_ids) for choice in self.choices.values())
        return {
            "prompt_tokens": len(self.prompt_ids),
            "completion_tokens": completion,
            "total_tokens": len(self.prompt_ids) + completion,
        }

    def whole(self) -> Json:
        choices = [
            {
                **_tokens(choice),
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
            }
            for _, choice in sorted(self.choices.items())
        ]
        return {
            **self.head("chat.completion"),
            "prompt_token_ids": self.prompt_ids,
            "choices": choices,
            "usage": self.usage(),
        }

    def chunk(self, delta: Delta, *, first: bool) -> Json:
        message: Json = {"role": "assistant"} if first else {}
        chunk = {
            **self.head("chat.completion.chunk"),
            "choices": [{**_tokens(delta), "delta": {**message, "content": delta.text}}],
        }
        if delta.prompt_ids:
            chunk["prompt_token_ids"] = delta.prompt_ids
        return chunk


def _tokens(delta: Delta) -> Json:
    content: list[Json] = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(delta.token_ids, delta.logprobs, strict=True)
    ]
    return {
        "index": delta.index,
        "finish_reason": delta.finish_reason,
        "token_ids": delta.token_ids,
        "logprobs": {"content": content, "refusal": None},
    }


def routes(backend: Backend) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models")
    async def models() -> Json:
        return {"object": "list", "data": [_model(name) for name in backend.served_names()]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Json:
        backend.find(name)
        return _model(name)

    @router.post("/v1/chat/completions")
    async def chat(body: ChatRequest) -> Response:
        deltas = backend.sample(body.model, body.sample_request())
        answer = Answer(body.model)
        if body.stream:
            # The first delta is drawn before the status goes out, so that an error is a 4xx.
            step, first = await anext(deltas)
            answer.add(step, first)
            usage = bool((body.stream_options or {}).get("include_usage"))
            events = _events(answer, first, deltas, usage=usage)
            return StreamingResponse(events, media_type="text/event-stream")
        async for step, delta in deltas:
            answer.add(step, delta)
        return JSONResponse(answer.whole())

    return router


def _model(name: str) -> Json:
    return {"id": name, "object": "model", "created": 0, "owned_by": "art-cluster"}


async def _events(
    answer: Answer, first: Delta, deltas: AsyncIterator[tuple[int, Delta]], *, usage: bool
) -> AsyncIterator[str]:
    yield _event(answer.chunk(first, first=True))
    begun = {first.index}
    async for step, delta in deltas:
        answer.add(step, delta)
        yield _event(answer.chunk(delta, first=delta.index not in begun))
        begun.add(delta.index)
    if usage:
        tail = {**answer.head("chat.completion.chunk"), "choices": [], "usage": answer.usage()}
        yield _event(tail)
    yield "data: [DONE]\n\n"


def _event(value: Json) -> str:
    return f"data: {json.dumps(value)}\n\n"
