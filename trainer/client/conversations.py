"""Joins the recorded turns of a rollout into conversations, so that each choice is trained once.

A turn is one choice with the messages that it answered. A turn that continues a conversation is
added to it. Any other turn starts a new one: a second agent, a branch, a rewritten history, or
another choice of a request with `n` above 1.
"""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kit import json_text
from kit.types import Json


@dataclass(frozen=True)
class Turn:
    """One sampled choice, the messages that it answered and the tools that it could call."""

    messages: list[Json]
    choice: Json
    tools: list[Json] | None = None


@dataclass
class Conversation:
    """Messages and choices in order, as ART's histories hold them."""

    tools: list[Json] | None = None
    items: list[Json] = field(default_factory=list)
    _keys: list[Any] = field(default_factory=list)
    """Key that identifies each item."""

    def add(self, turn: Turn, keys: list[Any]) -> None:
        self.items += turn.messages[len(self.items) :]
        self.items.append(turn.choice)
        self._keys = [*keys, _key(turn.choice["message"])]

    def continued_by(self, turn: Turn, keys: list[Any]) -> bool:
        return self.tools == turn.tools and keys[: len(self._keys)] == self._keys

    def wire(self) -> Json:
        """Return the JSON of an `art.History`."""
        return {"messages_and_choices": self.items, "tools": self.tools}


def join(turns: Iterable[Turn]) -> list[Conversation]:
    """Join turns that continue each other, in the order in which they were recorded."""
    conversations: list[Conversation] = []
    for turn in turns:
        keys = [_key(message) for message in turn.messages]
        continued = [one for one in conversations if one.continued_by(turn, keys)]
        if not continued:
            # Earlier choices in its messages stay messages: they are trained where they began.
            continued = [Conversation(turn.tools)]
            conversations += continued
        max(continued, key=lambda one: len(one.items)).add(turn, keys)
    return conversations


def turns_of(recorded: Iterable[Json]) -> list[Turn]:
    """Return every choice of the calls that `GET /rollouts/ID` lists under `completions`.

    A request that only scores its prompt has a choice without tokens, which is left out.
    """
    return [
        Turn(call["messages"], {**choice, "policy_step": call["policy_step"]}, call.get("tools"))
        for call in recorded
        for choice in call["choices"]
        if (choice.get("logprobs") or {}).get("content")
    ]


def is_choice(item: Json) -> bool:
    return "message" in item and "role" not in item


def text_of(content: object) -> str:
    """Return the text of a message's content, which may be a list of parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


def _key(message: Json) -> Any:
    """Reduce a message to what identifies it, because frameworks add and drop empty fields."""
    calls = [_call(call.get("function") or {}) for call in message.get("tool_calls") or ()]
    return message.get("role"), text_of(message.get("content")).strip(), calls


def _call(function: Json) -> tuple[Any, Any]:
    arguments = function.get("arguments")
    with contextlib.suppress(ValueError):  # frameworks write the same arguments with other spaces
        arguments = json_text.parse(arguments) if isinstance(arguments, str) else arguments
    return function.get("name"), arguments
