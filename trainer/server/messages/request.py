"""The request of Anthropic's Messages API, translated to a chat."""

import json
from collections.abc import Iterable
from typing import Any, Literal

import pydantic
from pydantic import Field

from kit.types import Json
from trainer.errors import BadRequest, NotFound, UnknownThread, Unsupported
from trainer.server.chat.request import ChatRequest
from trainer.server.chat.translate import chat_request, check_extra, check_keys
from trainer.server.responses.items import with_instructions
from trainer.server.responses.store import ResponseStore

# Default values that clients send unprompted. Any other value is refused by its key.
_NEUTRAL: Json = {"mcp_servers": []}
# Keys that change no answer: storage, billing and caching at Anthropic.
_NO_EFFECT = {"betas", "cache_control", "inference_geo", "metadata", "service_tier"}
_TOOL_KEYS = {"type", "name", "description", "input_schema", "strict"}
_TOOL_NO_EFFECT = {"cache_control", "eager_input_streaming"}
_TOOL_NEUTRAL: Json = {"defer_loading": False, "allowed_callers": ["direct"]}


class Turn(pydantic.BaseModel):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Json]

    @property
    def blocks(self) -> list[Json]:
        text = self.content
        return [{"type": "text", "text": text}] if isinstance(text, str) else text


class CountRequest(pydantic.BaseModel):
    """The body of `/v1/messages/count_tokens`; keys that are not supported are refused by name."""

    model_config = pydantic.ConfigDict(extra="allow")

    model: str
    messages: list[Turn] = Field(min_length=1)
    system: str | list[Json] | None = None
    tools: list[Json] | None = None
    tool_choice: Json | None = None
    thinking: Json | None = None
    output_config: Json | None = None
    output_format: Json | None = None

    def chat(self, **settings: Any) -> ChatRequest:
        """The same request as a chat, with `settings` of its own."""
        passed = check_extra(self.model_extra, _NEUTRAL, _NO_EFFECT)
        tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools or ())] or None
        output = self.output_config or {}
        check_keys("output_config", output, {"effort", "format"}, {})
        return chat_request(
            **passed,
            **settings,
            **_tool_choice(self.tool_choice or {}, tools),
            model=self.model,
            messages=self._messages(),
            tools=tools,
            response_format=_format(output.get("format") or self.output_format),
            reasoning_effort=self._effort(),
        )

    def _effort(self) -> Any:
        """How long to think, for chat templates that know it."""
        match (self.thinking or {}).get("type"):
            case None | "adaptive":  # the model decides, as it does anyway
                effort = (self.output_config or {}).get("effort")
                return effort or None
            case "disabled":
                return "none"
            case kind:
                raise Unsupported(
                    f"`thinking` of type `{kind}` is not supported",
                    hint="Send `disabled` or `adaptive`; a model that thinks does so in its text",
                )

    def _messages(self) -> list[Json]:
        messages: list[Json] = []
        turns = _combined(self.messages)
        for number, (role, blocks) in enumerate(turns):
            place = f"messages[{number}].content"
            match role:
                case "assistant":
                    messages += _said(blocks, place)
                case "system":
                    messages.append({"role": "system", "content": _text(blocks, place)})
                case _:
                    messages += _asked(blocks, place)
        if turns[-1][0] == "assistant":
            raise Unsupported(
                "Continuing the last message of the assistant is not supported",
                hint="End with a user message",
            )
        return with_instructions(_text(self.system or "", "system"), messages)


class MessagesRequest(CountRequest):
    """The body of `/v1/messages`; keys that are not supported are refused by name."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = None
    stop: str | list[str] | None = None
    """The name that chats have for `stop_sequences`; both may be sent."""
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    thread: Json | None = None
    """Whether to keep the conversation under the answer's id, or which one to continue."""

    @property
    def stops(self) -> list[str]:
        """The texts that end the answer."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [*(self.stop_sequences or ()), *stop]

    def continued(self, threads: ResponseStore) -> "MessagesRequest":
        """The request with the messages, system prompt and tools of the thread it continues."""
        match self.thread:
            case None | {"type": "create"}:
                return self
            case {"type": "continue", "previous_message_id": str(previous)}:
                if self.system or self.tools:
                    raise BadRequest(
                        "A request that continues a thread has `system` or `tools`",
                        hint="Leave them out: they are those of the thread",
                        param="thread",
                    )
                try:
                    start = CountRequest.model_validate(threads.get(previous)["request"])
                except NotFound as error:
                    raise UnknownThread(
                        f"There is no thread with the message `{previous}`",
                        hint="Send all messages, with `thread` of type `create`",
                    ) from error
                earlier = {"system": start.system, "tools": start.tools}
                messages = [*start.messages, *self.messages]
                return self.model_copy(update={**earlier, "messages": messages})
        raise BadRequest(
            f"`thread` is `{self.thread}`",
            hint='Send `{"type": "create"}`, or `continue` with a `previous_message_id`',
            param="thread",
        )

    def keep(self, threads: ResponseStore, answer: Json) -> None:
        """Store the conversation under the id of its answer, if `thread` requests it."""
        if self.thread is not None:
            kept = self.model_dump(include={"model", "messages", "system", "tools"})
            kept["messages"].append({"role": "assistant", "content": answer["content"]})
            threads.put({"id": answer["id"], "output": [], "request": kept}, [])

    def as_chat(self) -> ChatRequest:
        return self.chat(
            max_tokens=self.max_tokens,
            stop=self.stops or None,
            stream=self.stream,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
        )


def _combined(turns: Iterable[Turn]) -> list[tuple[str, list[Json]]]:
    """Roles and their blocks; successive messages of one role are one turn."""
    combined: list[tuple[str, list[Json]]] = []
    for turn in turns:
        if combined and combined[-1][0] == turn.role:
            combined[-1][1].extend(turn.blocks)
        else:
            combined.append((turn.role, [*turn.blocks]))
    return combined


def _asked(blocks: list[Json], place: str) -> list[Json]:
    """The messages of a user's turn: the results of tools, then the text."""
    results: list[Json] = []
    texts: list[Json] = []
    for number, block in enumerate(blocks):
        if block.get("type") != "tool_result":
            texts.append(block)
            continue
        where = f"{place}[{number}]"
        content = _text(block.get("content") or "", f"{where}.content")
        if block.get("is_error"):
            content = f"Error: {content}"
        call_id = _required(block, "tool_use_id", where)
        results.append({"role": "tool", "tool_call_id": call_id, "content": content})
    if texts or not results:
        results.append({"role": "user", "content": _text(texts, place)})
    return results


def _said(blocks: list[Json], place: str) -> list[Json]:
    """The message of an assistant's turn."""
    message: Json = {"role": "assistant", "content": None}
    text: list[str] = []
    for number, block in enumerate(blocks):
        where = f"{place}[{number}]"
        match block.get("type"):
            case "text":
                text.append(_required(block, "text", where, empty=True))
            case "tool_use":
                message.setdefault("tool_calls", []).append(_call(block, where))
            case "thinking":
                thoughts = message.get("reasoning_content", "")
                message["reasoning_content"] = thoughts + str(block.get("thinking") or "")
            case kind:
                raise Unsupported(f"`{where}` of type `{kind}` is not supported")
    message["content"] = "".join(text) or (None if "tool_calls" in message else "")
    return [message]


def _call(block: Json, place: str) -> Json:
    arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
    function = {"name": _required(block, "name", place), "arguments": arguments}
    return {"id": _required(block, "id", place), "type": "function", "function": function}


def _text(content: object, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"`{place}` is not text", hint="Send text, or a list of text blocks")
    parts = []
    for number, block in enumerate(content):
        if not isinstance(block, dict) or block.get("type") != "text":
            kind = block.get("type") if isinstance(block, dict) else block
            raise Unsupported(
                f"`{place}[{number}]` of type `{kind}` is not supported", hint="Send text only"
            )
        parts.append(_required(block, "text", f"{place}[{number}]", empty=True))
    return "\n".join(parts)


def _required(block: Json, key: str, place: str, *, empty: bool = False) -> str:
    value = block.get(key)
    if not isinstance(value, str) or not (value or empty):
        raise BadRequest(f"`{place}.{key}` is missing", hint="Send blocks as they were received")
    return value


def _tool(tool: Json, place: str) -> Json:
    if tool.get("type") not in (None, "custom"):
        raise Unsupported(
            f"`{place}` of type `{tool['type']}` is not supported",
            hint="Give the agent a tool with an `input_schema`, which runs beside the agent",
        )
    for key, value in tool.items():
        known = key in _TOOL_KEYS or key in _TOOL_NO_EFFECT
        if not known and value is not None and value != _TOOL_NEUTRAL.get(key, ...):
            raise Unsupported(f"`{place}.{key}` is not supported")
    if not isinstance(tool.get("input_schema"), dict):
        raise BadRequest(f"`{place}.input_schema` is missing", hint="Send a JSON schema")
    function = {"name": _required(tool, "name", place), "parameters": tool["input_schema"]}
    optional = {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": {**function, **optional}}


def _tool_choice(choice: Json, tools: list[Json] | None) -> Json:
    parallel = False if tools and choice.get("disable_parallel_tool_use") else None
    match choice.get("type"):
        case None | "auto":
            wanted: str | Json | None = None
        case "any":
            wanted = "required"
        case "none":
            wanted = "none"
        case "tool":
            name = _required(choice, "name", "tool_choice")
            wanted = {"type": "function", "function": {"name": name}}
        case kind:
            raise BadRequest(
                f"`tool_choice.type` is `{kind}`", hint="Use `auto`, `any`, `tool` or `none`"
            )
    return {"tool_choice": wanted, "parallel_tool_calls": parallel}


def _format(wanted: object) -> Json | None:
    if not wanted:
        return None
    if not isinstance(wanted, dict):
        raise BadRequest("`output_config.format` is not an object", hint='Send `{"type": …}`')
    if wanted.get("type") != "json_schema" or not isinstance(wanted.get("schema"), dict):
        raise Unsupported(
            f"`output_config.format` of type `{wanted.get('type')}` is not supported",
            hint="Send `json_schema` with a `schema`",
        )
    schema = {"name": "output", "schema": wanted["schema"], "strict": True}
    return {"type": "json_schema", "json_schema": schema}
