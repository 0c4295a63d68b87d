"""The answer of OpenAI's Responses API, built from the chunks of a chat."""

import itertools
import json
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from kit.errors import KitError
from kit.types import Json
from trainer.errors import storage_faults
from trainer.server.chat.translate import choice_id
from trainer.server.responses.request import ResponsesRequest

_TOOL_KEYS = ("description", "parameters", "strict")


class ResponseAnswer:
    """Turns chunks into the events of a stream; the last event holds the whole response.

    One message item holds the text and one item each call. They stay open until the chat ends,
    because text may follow a call.
    """

    def __init__(self, request: ResponsesRequest) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"
        self._request = request
        self._created = time.time()
        self._step = 0
        self._choice_id: Json = {}
        self._items: list[Json] = []
        self._message: int | None = None
        """Position of the message among the items."""
        self._early: list[Json] = []
        """Logprobs of tokens whose text is held back, until the message opens."""
        self._calls: dict[int, int] = {}
        """Positions of the calls, by their index in the chat."""
        self._finish_reason: str | None = None
        self._sequence = 0

    @property
    def output(self) -> list[Json]:
        return self._items

    def begin(self, first: Json) -> Iterator[Json]:
        """The events before those of the first chunk."""
        self._step = first["policy_step"]
        for kind in ("created", "in_progress"):
            response = self._object("in_progress", None)
            yield self._event(f"response.{kind}", response=response)

    def add(self, chunk: Json) -> Iterator[Json]:
        """The events of one chunk."""
        self._step = chunk["policy_step"]
        for choice in chunk["choices"]:
            self._choice_id |= choice_id(choice)
            delta = choice["delta"] if "delta" in choice else choice["message"]
            logprobs = self._logprobs(choice)
            if delta.get("content"):
                yield from self._text(delta["content"], logprobs)
            else:
                held = self._early if self._message is None else self._part["logprobs"]
                held += logprobs
            for number, call in enumerate(delta.get("tool_calls") or ()):
                yield from self._call(call.get("index", number), call)
            self._finish_reason = choice.get("finish_reason") or self._finish_reason

    def end(self) -> Iterator[Json]:
        """The events that close all items."""
        if not self._items:
            yield from self._text("", [])
        for position, item in enumerate(self._items):
            # A call is listed only once it is complete, so a limit cuts off the text alone.
            cut_off = self._truncated and item["type"] == "message"
            item["status"] = "incomplete" if cut_off else "completed"
            where = {"item_id": item["id"], "output_index": position}
            if item["type"] == "message":
                part = item["content"][0]
                where["content_index"] = 0
                logprobs = part["logprobs"]
                yield self._event(
                    "response.output_text.done", **where, text=part["text"], logprobs=logprobs
                )
                yield self._event("response.content_part.done", **where, part=part)
            else:
                yield self._event(
                    "response.function_call_arguments.done",
                    **where,
                    name=item["name"],
                    arguments=item["arguments"],
                )
            yield self._event("response.output_item.done", output_index=position, item=item)

    def whole(self, usage: Json) -> Json:
        """The response, after `end`."""
        return self._object("incomplete" if self._truncated else "completed", usage)

    def last(self, usage: Json) -> Json:
        """The last event of a stream."""
        response = self.whole(usage)
        return self._event(f"response.{response['status']}", response=response)

    def failed(self, error: KitError) -> Iterator[Json]:
        """The events of an answer that breaks off."""
        yield self._event("error", code="server_error", message=str(error), param=None)
        response = self._object("failed", None)
        response["error"] = {"code": "server_error", "message": str(error)}
        yield self._event("response.failed", response=response)

    @property
    def _truncated(self) -> bool:
        return self._finish_reason == "length"

    @property
    def _part(self) -> Json:
        part: Json = self._items[self._message or 0]["content"][0]
        return part

    def _text(self, text: str, logprobs: list[Json]) -> Iterator[Json]:
        if self._message is None:
            self._message = len(self._items)
            logprobs = [*self._early, *logprobs]
            item: Json = {
                **{"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"},
                **{"status": "in_progress", "content": []},
            }
            yield from self._open(item)
            part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item["content"].append(part)
            yield self._event(
                "response.content_part.added", **self._where(self._message), part={**part}
            )
        part = self._part
        part["text"] += text
        part["logprobs"] += logprobs
        if text:
            where = self._where(self._message)
            yield self._event("response.output_text.delta", **where, delta=text, logprobs=logprobs)

    def _call(self, index: int, call: Json) -> Iterator[Json]:
        function = call.get("function") or {}
        if index not in self._calls:
            self._calls[index] = len(self._items)
            item: Json = {
                **{"id": f"fc_{uuid.uuid4().hex}", "type": "function_call"},
                **{"call_id": call["id"], "name": function["name"], "arguments": ""},
                **{"status": "in_progress"},
            }
            yield from self._open(item)
        position = self._calls[index]
        item = self._items[position]
        if arguments := function.get("arguments"):
            item["arguments"] += arguments
            where = {"item_id": item["id"], "output_index": position}
            yield self._event("response.function_call_arguments.delta", **where, delta=arguments)

    def _open(self, item: Json) -> Iterator[Json]:
        item.update(self._choice_id)
        self._items.append(item)
        position = len(self._items) - 1
        # A copy: the item grows until the event is written.
        copy = {**item, "content": []} if "content" in item else {**item}
        yield self._event("response.output_item.added", output_index=position, item=copy)

    def _where(self, position: int) -> Json:
        item_id = self._items[position]["id"]
        return {"item_id": item_id, "output_index": position, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> Json:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}

    def _logprobs(self, choice: Json) -> list[Json]:
        """The logprobs of a chunk's tokens; OpenAI's types require a list of `bytes`."""
        if not self._request.wants_logprobs:
            return []
        tokens = (choice.get("logprobs") or {}).get("content") or []
        return [
            {**_token(token), "top_logprobs": [_token(t) for t in token["top_logprobs"]]}
            for token in tokens
        ]

    def _object(self, status: str, usage: Json | None) -> Json:
        request = self._request
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        done = status in ("completed", "incomplete")
        return {
            **{"id": self.id, "object": "response", "created_at": self._created},
            **{"status": status, "error": None, "incomplete_details": reason},
            "completed_at": time.time() if done else None,
            "model": request.model,
            "output": self._items if usage else [],
            "usage": _usage(usage) if usage else None,
            "instructions": request.instructions,
            "previous_response_id": request.previous_response_id,
            "max_output_tokens": request.max_output_tokens,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "top_logprobs": request.top_logprobs or 0,
            "tools": [_tool(tool) for tool in request.tools or ()],
            "tool_choice": request.tool_choice or "auto",
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "text": {"format": {"type": "text"}, **(request.text or {})},
            "reasoning": {"effort": None, "summary": None, **(request.reasoning or {})},
            "metadata": request.metadata or {},
            "store": request.store is not False,
            **{"truncation": "disabled", "background": False, "service_tier": "default"},
            "policy_step": self._step,
            **(self._choice_id if done else {}),
        }


async def events(
    answer: ResponseAnswer, chunks: AsyncGenerator[Json, None], finish: Any
) -> AsyncGenerator[str, None]:
    """The stream of an answer; `finish` returns the usage, and stores the response."""
    try:
        first = await anext(chunks)
        for event in itertools.chain(answer.begin(first), answer.add(first)):
            yield _line(event)
        async for chunk in chunks:
            for event in answer.add(chunk):
                yield _line(event)
        for event in answer.end():
            yield _line(event)
        with storage_faults():
            usage = finish()
    except KitError as error:
        for event in answer.failed(error):
            yield _line(event)
        return
    yield _line(answer.last(usage))


def _line(event: Json) -> str:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"


def _usage(usage: Json) -> Json:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def _tool(tool: Json) -> Json:
    """The tool with all of its keys, which OpenAI's types require."""
    return {**dict.fromkeys(_TOOL_KEYS), **tool}


def _token(token: Json) -> Json:
    return {
        "token": token["token"],
        "logprob": token["logprob"],
        "bytes": token.get("bytes") or [],
    }
