"""The answer of Anthropic's Messages API, built from the chunks of a chat."""

import itertools
import json
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator

from kit.errors import KitError
from kit.types import Json
from trainer.errors import storage_faults
from trainer.server.chat.translate import choice_id
from trainer.server.messages.errors import error_body

_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
StopSequence = Callable[[list[int]], str | None]
"""Finds the stop sequence that ended a text of tokens, or None if the model ended it."""


class MessageAnswer:
    """Turns chunks into blocks and the events of a stream. One block is open at a time."""

    def __init__(self, model: str, stop_sequence: StopSequence) -> None:
        self._model = model
        self._stop_sequence = stop_sequence
        self._id = f"msg_{uuid.uuid4().hex}"
        self._blocks: list[Json] = []
        self._open: int | str | None = None
        """`text`, the index of the call whose block is open, or None."""
        self._step = 0
        self._choice_id: Json = {}
        self._token_ids: list[int] = []
        self._finish_reason: str | None = None

    def begin(self, first: Json, input_tokens: int) -> Iterator[Json]:
        """The events before those of the first chunk."""
        self._step = first["policy_step"]
        self._choice_id = choice_id(first["choices"][0])
        message = self._object(None, None, {"input_tokens": input_tokens, "output_tokens": 0})
        yield {"type": "message_start", "message": {**message, "content": []}}
        yield {"type": "ping"}

    def add(self, chunk: Json) -> Iterator[Json]:
        """The events of one chunk."""
        self._step = chunk["policy_step"]
        for choice in chunk["choices"]:
            self._choice_id |= choice_id(choice)
            self._token_ids += choice["token_ids"]
            delta = choice["delta"] if "delta" in choice else choice["message"]
            if delta.get("content"):
                yield from self._text(delta["content"])
            for number, call in enumerate(delta.get("tool_calls") or ()):
                yield from self._call(call.get("index", number), call)
            self._finish_reason = choice.get("finish_reason") or self._finish_reason

    def end(self) -> Iterator[Json]:
        """The events that close the last block."""
        if not self._blocks:  # clients read the first block
            yield from self._start("text", {"type": "text", "text": ""})
        yield from self._stop()

    def whole(self, usage: Json) -> Json:
        """The message, after `end`."""
        reason, sequence = self._stop_reason()
        return self._object(reason, sequence, _usage(usage))

    def last(self, usage: Json) -> Iterator[Json]:
        """The last events of a stream."""
        reason, sequence = self._stop_reason()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        yield {"type": "message_delta", "delta": delta, "usage": _usage(usage)}
        yield {"type": "message_stop"}

    def _object(self, reason: str | None, sequence: str | None, usage: Json) -> Json:
        blocks = [
            {**block, "input": json.loads(block["input"] or "{}")} if "input" in block else block
            for block in self._blocks
        ]
        return {
            **{"id": self._id, "type": "message", "role": "assistant", "model": self._model},
            **{"content": blocks, "stop_reason": reason, "stop_sequence": sequence},
            **{"usage": usage, "policy_step": self._step, **self._choice_id},
        }

    def _stop_reason(self) -> tuple[str, str | None]:
        reason = _REASONS.get(self._finish_reason or "")
        if reason is None and any(block["type"] == "tool_use" for block in self._blocks):
            return "tool_use", None  # a chat that names its tool ends with `stop`
        if reason is None and (sequence := self._stop_sequence(self._token_ids)):
            return "stop_sequence", sequence
        return reason or "end_turn", None

    def _text(self, text: str) -> Iterator[Json]:
        if self._open != "text":
            yield from self._start("text", {"type": "text", "text": ""})
        self._blocks[-1]["text"] += text
        yield self._delta({"type": "text_delta", "text": text})

    def _call(self, index: int, call: Json) -> Iterator[Json]:
        function = call.get("function") or {}
        if self._open != index:
            block = {"type": "tool_use", "id": call["id"], "name": function["name"]}
            yield from self._start(index, {**block, "input": {}})
            self._blocks[-1]["input"] = ""
        if arguments := function.get("arguments"):
            self._blocks[-1]["input"] += arguments
            yield self._delta({"type": "input_json_delta", "partial_json": arguments})

    def _start(self, key: int | str, block: Json) -> Iterator[Json]:
        yield from self._stop()
        self._open = key
        self._blocks.append(block)
        index = len(self._blocks) - 1
        yield {"type": "content_block_start", "index": index, "content_block": {**block}}

    def _stop(self) -> Iterator[Json]:
        if self._open is not None:
            self._open = None
            yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}


async def events(
    answer: MessageAnswer,
    chunks: AsyncGenerator[Json, None],
    input_tokens: int,
    usage: Callable[[], Json],
) -> AsyncGenerator[str, None]:
    """The stream of an answer."""
    try:
        first = await anext(chunks)
        for event in itertools.chain(answer.begin(first, input_tokens), answer.add(first)):
            yield _line(event)
        async for chunk in chunks:
            for event in answer.add(chunk):
                yield _line(event)
        for event in answer.end():
            yield _line(event)
        with storage_faults():
            used = usage()
    except KitError as error:
        yield _line(error_body(getattr(error, "status", 500), str(error)))
        return
    for event in answer.last(used):
        yield _line(event)


def _line(event: Json) -> str:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"


def _usage(usage: Json) -> Json:
    return {
        "input_tokens": usage["prompt_tokens"],
        "output_tokens": usage["completion_tokens"],
        **{"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0},
    }
