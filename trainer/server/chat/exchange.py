"""One request being answered: sampled, accumulated in chat form, and recorded in its rollout.

Every API that talks in messages uses it. `/v1/responses` and `/v1/messages` translate its chunks
and its whole answer into their own JSON.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from fastapi import Request

from kit.types import Json
from trainer.errors import storage_faults
from trainer.server.backend import Backend
from trainer.server.chat.answer import ChatAnswer
from trainer.server.chat.request import ChatRequest
from trainer.server.chat.template_limits import HEADER
from trainer.server.disconnects import while_connected
from trainer.server.prompts import prepare


class Exchange:
    """Samples a `ChatRequest`; `start` reads the whole answer, or the first chunk of a stream."""

    def __init__(self, backend: Backend, chat: ChatRequest, rollout: str | None) -> None:
        backend.models.find(chat.model)  # an unknown name is refused before any work
        tokenizer = backend.workers.tokenizer
        encode = partial(backend.encode, rollout=rollout)
        sample_request, text = chat.sample_request(tokenizer, encode)
        self.prompt_tokens = len(sample_request.prompt_ids)
        self.answer = ChatAnswer(
            chat, sample_request.prompt_ids, tokenizer, recorded=rollout is not None
        )
        self.deltas = backend.sample(
            chat.model,
            sample_request,
            rollout=rollout,
            template=chat.template(tokenizer),
            prompt_text=text,
        )
        """The source of `chunks`, which a stream must close when its client leaves."""
        self._backend = backend
        self._rollout = rollout
        self._stream = bool(chat.stream)
        self._first: Json = {}

    @classmethod
    async def start(cls, backend: Backend, request: Request, chat: ChatRequest) -> "Exchange":
        """Sample until there is something to send, so that errors come before the status."""
        rollout = request.path_params.get("rollout")
        exchange = await prepare(lambda: cls(backend, chat, rollout), chat.messages, chat.tools)
        await while_connected(request, exchange._read())
        return exchange

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response: warnings about the model's chat template."""
        warnings = self.answer.warnings
        return {HEADER: "; ".join(warnings)} if warnings else {}

    async def _read(self) -> None:
        if self._stream:
            self._first = self.answer.chunk(*await anext(self.deltas))
            return
        async with aclosing(self.deltas):
            async for step, delta in self.deltas:
                self.answer.add(step, delta)
        self._record()

    async def chunks(self) -> AsyncGenerator[Json, None]:
        """Yield the chunks of a stream in chat form. The rollout is recorded before they end.

        So a client that has read the last event of its stream may fetch the rollout.
        """
        yield self._first
        with storage_faults():
            async for step, delta in self.deltas:
                yield self.answer.chunk(step, delta)
            self._record()

    def _record(self) -> None:
        if self._rollout:
            self._backend.rollouts.record(self._rollout, self.answer.conversation())
