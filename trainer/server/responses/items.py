"""Translates the items of OpenAI's Responses API to the messages of a chat."""

import json
from collections.abc import Callable, Iterable

from kit.types import Json
from trainer.errors import BadRequest, Unsupported

Lookup = Callable[[str], Json]
"""Finds the stored item with an id, or raises NotFound."""
_TEXT = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_ROLES = {"developer": "system"}  # the name that chat templates know


def messages_of(given: str | list[Json], lookup: Lookup) -> list[Json]:
    """The messages of an `input`, which is the text of a user or a list of items.

    One turn of the model is several items here and one message in a chat: its thoughts, its text
    and its calls.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    turns = _Turns(lookup)
    for number, item in enumerate(given):
        turns.add(item, f"input[{number}]")
    return turns.messages


def with_instructions(instructions: str | None, messages: list[Json]) -> list[Json]:
    """Put `instructions` first, in one message with the system messages that follow them.

    Many chat templates accept a single system message only.
    """
    system = [instructions] if instructions else []
    rest = list(messages)
    while rest and rest[0]["role"] == "system":
        system.append(rest.pop(0)["content"])
    return [{"role": "system", "content": "\n\n".join(system)}, *rest] if system else rest


class _Turns:
    def __init__(self, lookup: Lookup) -> None:
        self.messages: list[Json] = []
        self._lookup = lookup

    def add(self, item: Json, place: str) -> None:
        match kind := item.get("type") or ("message" if "role" in item else "item_reference"):
            case "message":
                self._message(item, place)
            case "function_call":
                self._turn(calls=True).setdefault("tool_calls", []).append(_call(item, place))
            case "function_call_output":
                output = text_of(item.get("output"), f"{place}.output")
                call_id = _required(item, "call_id", place)
                self.messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
            case "reasoning":
                self._reasoning(item, place)
            case "item_reference":
                self.add(self._lookup(_required(item, "id", place)), place)
            case _:
                raise Unsupported(
                    f"`{place}` of type `{kind}` is not supported",
                    hint="Send messages, function calls and their outputs",
                )

    def _message(self, item: Json, place: str) -> None:
        role = _required(item, "role", place)
        content = text_of(item.get("content"), f"{place}.content")
        if role == "assistant":
            turn = self._turn(calls=False)
            turn["content"] = content
        elif role in ("user", "system", "developer"):
            self.messages.append({"role": _ROLES.get(role, role), "content": content})
        else:
            raise BadRequest(
                f"`{place}.role` is `{role}`", hint="Use user, system, developer or assistant"
            )

    def _turn(self, *, calls: bool) -> Json:
        """The assistant's message that is being put together, or a new one.

        Text after text begins a new message; text after thoughts or calls does not.
        """
        newest = self.messages[-1] if self.messages else {"role": ""}
        if newest["role"] != "assistant" or (not calls and newest["content"] is not None):
            newest = {"role": "assistant", "content": None}
            self.messages.append(newest)
        return newest

    def _reasoning(self, item: Json, place: str) -> None:
        thoughts = text_of(item.get("content") or item.get("summary") or [], place)
        if not thoughts and item.get("encrypted_content"):
            raise Unsupported(
                f"`{place}.encrypted_content` is not supported",
                hint="Only the server that encrypted it can read it; remove the item",
            )
        if thoughts:
            self.messages.append(
                {"role": "assistant", "content": None, "reasoning_content": thoughts}
            )


def text_of(content: object, place: str) -> str:
    """The text of a message's content: a string, or parts that are all text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"`{place}` is missing", hint="Send text, or a list of parts")
    return "".join(_parts(content, place))


def _parts(parts: Iterable[object], place: str) -> Iterable[str]:
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, dict) and kind in _TEXT:
            yield str(part.get("text") or "")
        elif isinstance(part, dict) and kind == "refusal":
            yield str(part.get("refusal") or "")
        else:
            raise Unsupported(f"`{place}` of type `{kind}` is not supported", hint="Send text only")


def _call(item: Json, place: str) -> Json:
    arguments = item.get("arguments")
    return {
        "id": _required(item, "call_id", place),
        "type": "function",
        "function": {
            "name": _required(item, "name", place),
            "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments or {}),
        },
    }


def _required(item: Json, key: str, place: str) -> str:
    value = item.get(key)
    if not isinstance(value, str) or not value:
        raise BadRequest(f"`{place}.{key}` is missing", hint="Send items as they were received")
    return value
