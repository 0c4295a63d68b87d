"""The answer of a chat completion, as OpenAI's clients read it."""

import json
import time
import uuid
from collections.abc import AsyncGenerator

from kit.errors import KitError
from kit.types import Json
from trainer.base_model.tokenizer import Tokenizer
from trainer.engines.engine import Delta
from trainer.exact_tokens import CHOICE_ID, IMPOSSIBLE, PREFIX
from trainer.server.chat.request import ChatRequest
from trainer.server.chat.tool_calls import ToolCallParser
from trainer.server.error_answers import error_event
from trainer.server.policy_spans import policy_spans


class ChatAnswer:
    """Builds OpenAI's JSON from the deltas of one request, whole or chunk by chunk.

    Exact tokens and their logprobs are included, requested or not. Only where a rollout records
    them, a request may turn them off.
    """

    def __init__(
        self,
        request: ChatRequest,
        prompt_ids: list[int],
        tokenizer: Tokenizer,
        *,
        recorded: bool = False,
    ) -> None:
        self._request = request
        self._logprobs = not (recorded and request.logprobs is False)
        self._may_call = bool(request.tool_use.functions)
        self._prompt_ids = prompt_ids
        self._tokenizer = tokenizer
        self.warnings = request.warnings(tokenizer)
        """Parts of the request that the model does not see, one sentence each."""
        self._step = 0
        self._head: Json = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": request.model,
        }
        self._choices: dict[int, Delta] = {}
        self._parsers: dict[int, ToolCallParser] = {}

    def add(self, step: int, delta: Delta) -> None:
        """Add a delta that policy step `step` sampled."""
        self._step = step
        parser = self._parsers.setdefault(delta.index, ToolCallParser())
        if self._may_call:
            delta.text = parser.add(delta.text) + (parser.finish() if delta.finish_reason else "")
        self._choices.setdefault(delta.index, Delta(delta.index)).extend(delta)

    def chunk(self, step: int, delta: Delta) -> Json:
        """Add a delta, and return its chunk of a stream."""
        first = delta.index not in self._choices
        begins = first or not self._choices[delta.index].token_ids
        sent = 0 if first else len(self._parsers[delta.index].calls)
        self.add(step, delta)
        message: Json = {"role": "assistant"} if first else {}
        # With a string in every chunk, a message of calls alone would end up with one.
        message["content"] = (delta.text or None) if self._may_call else delta.text
        if new := self._parsers[delta.index].calls[sent:]:
            message["tool_calls"] = [
                {"index": number, **call} for number, call in enumerate(new, start=sent)
            ]
        chunk = self._object("chat.completion.chunk")
        if first and len(self._choices) == 1:
            chunk["prompt_token_ids"] = self._prompt_ids
            chunk.update({"warnings": self.warnings} if self.warnings else {})
        tokens = self._tokens(delta, logprobs=self._logprobs, begins=begins)
        return {**chunk, "choices": [{**tokens, "delta": message}]}

    async def events(self, chunks: AsyncGenerator[Json, None]) -> AsyncGenerator[str, None]:
        """Yield the events of a stream that consists of `chunks`."""
        options = self._request.stream_options or {}
        try:
            async for chunk in chunks:
                usage = {"usage": self.usage()} if options.get("continuous_usage_stats") else {}
                yield _event({**chunk, **usage})
        except KitError as error:
            yield error_event(error)
            return
        if options.get("include_usage"):
            chunk = self._object("chat.completion.chunk")
            yield _event({**chunk, "choices": [], "usage": self.usage()})
        yield "data: [DONE]\n\n"

    def whole(self) -> Json:
        """The answer to a request that does not stream."""
        return {
            **self._object("chat.completion"),
            "prompt_token_ids": self._prompt_ids,
            "choices": self._whole_choices(logprobs=self._logprobs),
            "usage": self.usage(),
            **({"warnings": self.warnings} if self.warnings else {}),
        }

    def choices(self) -> list[Delta]:
        """The choices, as far as they are sampled."""
        return [choice for _, choice in sorted(self._choices.items())]

    def conversation(self) -> Json:
        """The messages and their answer, as the record of a rollout keeps them."""
        return {
            "model": self._request.model,
            "policy_step": self._step,
            "created": time.time(),
            "messages": self._request.messages,
            "tools": self._request.shown_tools,
            "choices": self._whole_choices(logprobs=True),
            "usage": self.usage(),
        }

    def _whole_choices(self, *, logprobs: bool) -> list[Json]:
        choices = []
        for index, choice in sorted(self._choices.items()):
            message: Json = {"role": "assistant", "content": choice.text, "refusal": None}
            if calls := self._parsers[index].calls:
                message.update(content=choice.text or None, tool_calls=calls)
            choices.append({**self._tokens(choice, logprobs=logprobs), "message": message})
        return choices

    def _object(self, kind: str) -> Json:
        return {**self._head, "object": kind, "policy_step": self._step}

    def usage(self) -> Json:
        """The numbers of tokens of the prompt and of all choices."""
        prompt = len(self._prompt_ids)
        completion = sum(len(choice.token_ids) for choice in self._choices.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def _tokens(self, delta: Delta, *, logprobs: bool, begins: bool = True) -> Json:
        """The tokens of a delta, with the id of its choice."""
        called = delta.finish_reason == "stop" and self._parsers[delta.index].calls
        # OpenAI's answer to a named function ends with `stop`.
        by_choice = called and not self._request.tool_use.named
        return {
            "index": delta.index,
            CHOICE_ID: delta.choice_id,
            "finish_reason": "tool_calls" if by_choice else delta.finish_reason,
            "token_ids": delta.token_ids,
            "logprobs": self._content(delta, begins=begins) if logprobs else None,
            **self._spans(delta),
        }

    def _content(self, delta: Delta, *, begins: bool) -> Json:
        """The logprobs of a delta; the first token of a choice carries its id too."""
        content: list[Json] = [
            {"token": f"{PREFIX}{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(delta.token_ids, delta.logprobs, strict=True)
        ]
        if begins and content:
            content[0][CHOICE_ID] = delta.choice_id
        for entry, token, tops in zip(content, delta.token_ids, delta.top_logprobs, strict=False):
            entry["bytes"] = list(self._tokenizer.token_bytes(token))
            entry["top_logprobs"] = [self._top(*top) for top in tops]
        return {"content": content, "refusal": None}

    def _top(self, token: int, logprob: float) -> Json:
        # The token's bytes let a client read it; its name is its id, as everywhere.
        spelled = list(self._tokenizer.token_bytes(token))
        # JSON has no infinity.
        return {"token": f"{PREFIX}{token}", "logprob": max(logprob, IMPOSSIBLE), "bytes": spelled}

    def _spans(self, delta: Delta) -> Json:
        end = len(self._choices[delta.index].token_ids)
        start = end - len(delta.token_ids)
        prompt = len(self._prompt_ids)
        return policy_spans(self._request.model, self._step, prompt=prompt, start=start, end=end)


def _event(value: Json) -> str:
    return f"data: {json.dumps(value)}\n\n"
