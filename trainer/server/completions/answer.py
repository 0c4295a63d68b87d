"""The answer of OpenAI's legacy completions, with its lists of tokens, logprobs and offsets."""

import codecs
import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

from kit.errors import KitError
from kit.types import Json
from trainer.base_model.tokenizer import Tokenizer
from trainer.engines.engine import Delta, SampleRequest
from trainer.errors import storage_faults
from trainer.exact_tokens import CHOICE_ID, PREFIX
from trainer.server.chat.answer import ChatAnswer
from trainer.server.chat.request import ChatRequest
from trainer.server.completions.merge import Merged
from trainer.server.completions.request import CompletionRequest
from trainer.server.error_answers import error_event


class CompletionAnswer:
    """Builds OpenAI's JSON from the deltas of all prompts, whole or chunk by chunk.

    The choices of all prompts are in one list: first those of the first prompt.
    """

    def __init__(
        self, body: CompletionRequest, requests: Sequence[SampleRequest], tokenizer: Tokenizer
    ) -> None:
        self._body = body
        self._tokenizer = tokenizer
        self._prompts = [_Prompt(body, request, tokenizer) for request in requests]
        self._step = 0
        self._head: Json = {
            **{"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion"},
            **{"created": int(time.time()), "model": body.model},
        }

    def add(self, number: int, step: int, delta: Delta) -> None:
        """Add a delta of a prompt."""
        self._step = step
        self._prompts[number].answer.add(step, delta)

    def chunk(self, number: int, step: int, delta: Delta) -> Json:
        """Add a delta of a prompt, and return its chunk of a stream."""
        self.add(number, step, delta)
        options = self._body.stream_options or {}
        usage = {"usage": self._usage()} if options.get("continuous_usage_stats") else {}
        return {**self._object(), "choices": [self._choice(number, delta)], **usage}

    async def events(
        self, first: Json, deltas: Merged, record: Callable[[list[Json]], None]
    ) -> AsyncGenerator[str, None]:
        """The events of a stream; conversations are recorded before the last one."""
        yield _event(first)
        try:
            with storage_faults():
                async for number, step, delta in deltas:
                    yield _event(self.chunk(number, step, delta))
                record(self.conversations())
        except KitError as error:
            yield error_event(error)
            return
        if (self._body.stream_options or {}).get("include_usage"):
            yield _event({**self._object(), "choices": [], "usage": self._usage()})
        yield "data: [DONE]\n\n"

    def whole(self) -> Json:
        """The answer to a request that does not stream."""
        choices = [
            self._choice(number, choice, whole=True)
            for number, prompt in enumerate(self._prompts)
            for choice in prompt.answer.choices()
        ]
        return {**self._object(), "choices": choices, "usage": self._usage()}

    def conversations(self) -> list[Json]:
        """Each prompt and its choices in the form of a chat, as rollouts keep them."""
        if self._body.max_tokens == 0:
            return []  # nothing was sampled
        return [prompt.answer.conversation() for prompt in self._prompts]

    def _choice(self, number: int, delta: Delta, *, whole: bool = False) -> Json:
        index = number * (self._body.n or 1) + delta.index
        return {"index": index, **self._prompts[number].choice(delta, whole=whole)}

    def _object(self) -> Json:
        return {**self._head, "policy_step": self._step}

    def _usage(self) -> Json:
        usages = [prompt.answer.usage() for prompt in self._prompts]
        return {key: sum(usage[key] for usage in usages) for key in usages[0]}


class _Prompt:
    """One prompt: its choices, and the chat that stands for it in a rollout."""

    def __init__(
        self, body: CompletionRequest, request: SampleRequest, tokenizer: Tokenizer
    ) -> None:
        self._body = body
        self._ids = request.prompt_ids
        self._tokenizer = tokenizer
        self._text = tokenizer.decode(self._ids)
        message = {"role": "user", "content": self._text}
        chat = ChatRequest(model=body.model, messages=[message], top_logprobs=body.logprobs)
        self.answer = ChatAnswer(chat, self._ids, tokenizer)
        self._offsets: dict[int, _Offsets] = {}

    def choice(self, delta: Delta, *, whole: bool) -> Json:
        """A whole choice, or what a delta adds to it: the prompt too, if it is the first one."""
        first = whole or delta.index not in self._offsets
        if first:
            self._offsets[delta.index] = _Offsets(self._tokenizer)
        echo = first and bool(self._body.echo)
        choice = {
            "text": (self._text if echo else "") + delta.text,
            "finish_reason": delta.finish_reason,
            "logprobs": self._logprobs(delta, echo) if self._body.logprobs is not None else None,
            "token_ids": delta.token_ids,
            CHOICE_ID: delta.choice_id,
        }
        return {**choice, "prompt_token_ids": self._ids} if first else choice

    def _logprobs(self, delta: Delta, echo: bool) -> Json:
        ids, tops = delta.token_ids, delta.top_logprobs
        logprobs: list[float | None] = [*delta.logprobs]
        if echo:
            prompt_logprobs = delta.prompt_logprobs or [None] * len(self._ids)
            prompt_tops = delta.prompt_top_logprobs or [[] for _ in self._ids]
            ids, logprobs = self._ids + ids, prompt_logprobs + logprobs
            tops = prompt_tops + (tops or [[] for _ in delta.token_ids])
        offsets = self._offsets[delta.index]
        return {
            "tokens": [self._name(token) for token in ids],
            "token_logprobs": logprobs,
            "top_logprobs": [
                self._tops(token, logprob, tops[place] if tops else [])
                for place, (token, logprob) in enumerate(zip(ids, logprobs, strict=True))
            ],
            "text_offset": [offsets.next(token) for token in ids],
        }

    def _tops(
        self, token: int, logprob: float | None, tops: Iterable[tuple[int, float]]
    ) -> dict[str, float] | None:
        """The likeliest tokens and the sampled one; the first token of a prompt has none."""
        if logprob is None:
            return None
        named: dict[str, float] = {}
        for each, value in (*tops, (token, logprob)):
            named.setdefault(self._name(each), value)  # likeliest first, if names are equal
        return named

    def _name(self, token: int) -> str:
        if self._body.return_tokens_as_token_ids:
            return f"{PREFIX}{token}"
        return self._tokenizer.token_bytes(token).decode(errors="replace")


class _Offsets:
    """Counts the characters before each token. A character may span several tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._count = 0

    def next(self, token: int) -> int:
        before = self._count
        self._count += len(self._decoder.decode(self._tokenizer.token_bytes(token)))
        return before


def _event(value: Json) -> str:
    return f"data: {json.dumps(value)}\n\n"
