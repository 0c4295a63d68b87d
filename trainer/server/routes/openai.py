"""The OpenAI-compatible API. Exact tokens and logprobs are always in the answer, asked or not."""

import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

import pydantic
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from kit.types import Json
from trainer.base_model.tokenizer import Tokenizer
from trainer.engines.engine import Delta, SampleRequest
from trainer.errors import BadRequest, Unsupported
from trainer.exact_tokens import PREFIX
from trainer.server.backend import Backend
from trainer.server.disconnects import ClosingStream, while_connected
from trainer.server.tool_calls import ToolCallParser

# Values that ask for nothing: clients send them unasked. Anything else is refused by name.
_NEUTRAL: Json = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "top_logprobs": 0,
    "response_format": {"type": "text"},
    "store": False,
}
# vLLM's ways to ask for what every answer here holds anyway, and what changes no answer.
_ALWAYS = {"logprobs", "return_token_ids", "return_tokens_as_token_ids", "user"}


class ChatRequest(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")

    model: str
    messages: list[Json] = pydantic.Field(min_length=1)
    n: int | None = pydantic.Field(None, ge=1, le=256)
    max_tokens: int | None = pydantic.Field(None, ge=1)
    max_completion_tokens: int | None = pydantic.Field(None, ge=1)
    temperature: float | None = pydantic.Field(None, ge=0, le=2)
    top_p: float | None = pydantic.Field(None, gt=0, le=1)
    top_k: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: Json | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Json | None = None

    def sample_request(self, tokenizer: Tokenizer) -> SampleRequest:
        self._refuse_what_we_lack()
        variables = self.chat_template_kwargs or {}
        if taken := {"messages", "tools"} & variables.keys():
            raise BadRequest(
                f"`chat_template_kwargs` holds `{min(taken)}`",
                hint="Send it as a field of the request itself",
            )
        tools = None if self.tool_choice == "none" else self.tools
        return SampleRequest(
            prompt_ids=tokenizer.apply_chat_template(self.messages, tools, **variables),
            n=self.n or 1,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),  # vLLM's -1 keeps all
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            seed=self.seed,
            stream=bool(self.stream),
        )

    def _refuse_what_we_lack(self) -> None:
        for key, value in (self.model_extra or {}).items():
            if key not in _ALWAYS and value is not None and value != _NEUTRAL.get(key, ...):
                raise Unsupported(f"`{key}` is not supported")
        if self.tool_choice not in (None, "auto", "none"):
            raise Unsupported("`tool_choice` other than `auto` and `none` is not supported")
        if self.tools and self.parallel_tool_calls is False:
            raise Unsupported("`parallel_tool_calls: false` is not supported")


class Answer:
    """Turns the deltas of one request into OpenAI's JSON, whole or chunk by chunk."""

    def __init__(self, model: str, prompt_ids: list[int], *, tools: bool) -> None:
        self.step = 0
        self._head: Json = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self._prompt_ids = prompt_ids
        self._tools = tools
        self._choices: dict[int, Delta] = {}
        self._parsers: dict[int, ToolCallParser] = {}

    def whole(self) -> Json:
        choices = []
        for index, choice in sorted(self._choices.items()):
            message: Json = {"role": "assistant", "content": choice.text, "refusal": None}
            if calls := self._parsers[index].calls:
                message.update(content=choice.text or None, tool_calls=calls)
            choices.append({**self._tokens(choice), "message": message})
        return {
            **self._named("chat.completion"),
            "prompt_token_ids": self._prompt_ids,
            "choices": choices,
            "usage": self._usage(),
        }

    def said(self, messages: list[Json], tools: list[Json] | None) -> Json:
        """The conversation of this request, as a rollout's record keeps it."""
        whole = self.whole()
        return {
            "model": whole["model"],
            "policy_step": self.step,
            "created": time.time(),
            "messages": messages,
            "tools": tools,
            "choices": whole["choices"],
        }

    def add(self, step: int, delta: Delta) -> Json:
        """Take a delta in, and return it as a chunk of a stream."""
        self.step = step
        first = delta.index not in self._choices
        parser = self._parsers.setdefault(delta.index, ToolCallParser())
        if self._tools:
            delta.text = parser.add(delta.text) + (parser.finish() if delta.finish_reason else "")
        self._choices.setdefault(delta.index, Delta(delta.index)).extend(delta)
        message: Json = {"role": "assistant"} if first else {}
        message["content"] = delta.text
        if delta.finish_reason and parser.calls:
            message["tool_calls"] = [{"index": i, **call} for i, call in enumerate(parser.calls)]
        chunk = self._named("chat.completion.chunk")
        if first and len(self._choices) == 1:
            chunk["prompt_token_ids"] = self._prompt_ids
        return {**chunk, "choices": [{**self._tokens(delta), "delta": message}]}

    def tail(self) -> Json:
        return {**self._named("chat.completion.chunk"), "choices": [], "usage": self._usage()}

    def _named(self, kind: str) -> Json:
        return {**self._head, "object": kind, "policy_step": self.step}

    def _usage(self) -> Json:
        prompt, completion = (
            len(self._prompt_ids),
            sum(len(choice.token_ids) for choice in self._choices.values()),
        )
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def _tokens(self, delta: Delta) -> Json:
        content: list[Json] = [
            {"token": f"{PREFIX}{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(delta.token_ids, delta.logprobs, strict=True)
        ]
        called = delta.finish_reason == "stop" and self._parsers[delta.index].calls
        return {
            "index": delta.index,
            "finish_reason": "tool_calls" if called else delta.finish_reason,
            "token_ids": delta.token_ids,
            "logprobs": {"content": content, "refusal": None},
        }


def routes(backend: Backend) -> APIRouter:
    """The routes under `/v1`; they stand under `/rollouts/ID/v1` too, which groups a rollout."""
    router = APIRouter()

    @router.get("/v1/models")
    async def models() -> Json:
        return {"object": "list", "data": [_model(name) for name in backend.models.served_names()]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Json:
        backend.models.find(name)
        return _model(name)

    @router.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        backend.models.find(body.model)  # an unknown name, before anything is tokenised
        assert backend.tokenizer
        asked = body.sample_request(backend.tokenizer)
        rollout = request.path_params.get("rollout")
        answer = Answer(body.model, asked.prompt_ids, tools=bool(body.tools))
        deltas = backend.sample(body.model, asked, stream=bool(body.stream), rollout=rollout)

        def keep() -> None:
            if rollout:
                backend.rollouts.record(rollout, answer.said(body.messages, body.tools))

        if body.stream:
            # The first delta is drawn before the status goes out, so that an error is a 4xx.
            first = answer.add(*await while_connected(request, _next(deltas)))
            usage = bool((body.stream_options or {}).get("include_usage"))
            events = _events(answer, first, deltas, keep, usage=usage)
            return ClosingStream(events, deltas)

        async def sample() -> None:
            async with aclosing(deltas):
                async for step, delta in deltas:
                    answer.add(step, delta)

        await while_connected(request, sample())
        keep()
        return JSONResponse(answer.whole())

    return router


def _model(name: str) -> Json:
    return {"id": name, "object": "model", "created": 0, "owned_by": "art-cluster"}


async def _next(deltas: AsyncIterator[tuple[int, Delta]]) -> tuple[int, Delta]:
    return await anext(deltas)


async def _events(
    answer: Answer,
    first: Json,
    deltas: AsyncIterator[tuple[int, Delta]],
    keep: Callable[[], None],
    *,
    usage: bool,
) -> AsyncGenerator[str, None]:
    yield _event(first)
    async for step, delta in deltas:
        yield _event(answer.add(step, delta))
    keep()  # before the last event: who has seen the end may ask for the rollout
    if usage:
        yield _event(answer.tail())
    yield "data: [DONE]\n\n"


def _event(value: Json) -> str:
    return f"data: {json.dumps(value)}\n\n"
