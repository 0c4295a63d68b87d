"""Tool calls in Hermes format: `<tool_call>{"name": …, "arguments": {…}}</tool_call>` in text."""

import json
import uuid
from typing import Any

from kit.types import Json
from trainer.base_model.tokenizer import TOOL_TAGS

OPEN, CLOSE = TOOL_TAGS
DEEPEST = 100  # levels of the arguments of a call


class ToolCallParser:
    """Splits the text of one choice into content and tool calls while it streams.

    An invalid call stays in the content, so that no text of the model is lost. White space around
    calls is no content.
    """

    def __init__(self) -> None:
        self._pending = ""
        self._quoted = 0
        """How much of a call that has begun holds end tags in its strings only."""
        self._space = ""
        """White space that counts only if text follows it."""
        self.calls: list[Json] = []

    def add(self, text: str) -> str:
        """Add text, and return the content that no later text can change."""
        text = self._space + self._split(text)
        self._space = text[len(text.rstrip()) :]
        return text.rstrip()

    def _split(self, text: str) -> str:
        self._pending += text
        content = ""
        while True:
            before, opened, rest = self._pending.partition(OPEN)
            if not opened:
                kept = _overlap(before, OPEN)
                cut = len(before) - kept
                self._pending = before[cut:]
                return content + before[:cut]
            end = rest.find(CLOSE, self._quoted)
            # An argument may hold the end tag, for example a file that the agent writes.
            while end >= 0 and _in_string(rest[:end]):
                self._quoted = end + len(CLOSE)
                end = rest.find(CLOSE, self._quoted)
            content += before
            if end < 0:
                self._pending = OPEN + rest
                return content
            if call := parse_call(rest[:end]):
                self.calls.append(call)
                self._pending = rest[end + len(CLOSE) :]
                self._quoted = 0
            else:
                content += self._give_up(rest)

    def _give_up(self, rest: str) -> str:
        """Return an invalid call up to its first end tag, because a valid one may follow."""
        inside, closed, self._pending = rest.partition(CLOSE)
        self._quoted = 0
        return OPEN + inside + closed

    def finish(self) -> str:
        """Return the remaining text. A call without its end tag counts if its JSON is complete."""
        content = self._space
        while self._pending.startswith(OPEN):
            rest = self._pending[len(OPEN) :]
            if call := parse_call(rest):
                self.calls.append(call)
                self._pending = ""
            else:
                content += self._give_up(rest) + self._split("")
        pending, self._pending = self._pending, ""
        return content + pending if pending or not self.calls else content.rstrip()


def parse_call(text: str) -> Json | None:
    """An OpenAI tool call from the JSON inside the tags, or None."""
    try:
        value = json.loads(text)
        name, arguments = value["name"], value.get("arguments", value.get("parameters", {}))
        if not isinstance(name, str) or not isinstance(arguments, dict) or _is_deep(arguments):
            return None
        name.encode()
        # Python also reads NaN and half of a surrogate pair, which no answer can hold.
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        written.encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": name, "arguments": written},
    }


def _in_string(text: str) -> bool:
    """Whether JSON that begins with `text` goes on inside a string."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        pass
    return False


def _overlap(text: str, tag: str) -> int:
    """The number of characters at the end of `text` that may begin `tag`."""
    return next(
        (n for n in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-n:])), 0
    )


def _is_deep(value: Any) -> bool:
    """Whether a value is nested more deeply than any answer could be written with it inside."""
    level = [value]
    for _ in range(DEEPEST):
        nested = [it.values() if isinstance(it, dict) else it for it in level if it]
        level = [child for it in nested for child in it if isinstance(child, dict | list)]
    return bool(level)
