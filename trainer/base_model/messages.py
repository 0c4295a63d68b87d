"""Messages of a conversation in the form that chat templates expect."""

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from trainer.errors import Unsupported

Message = Mapping[str, Any]


def normalise(message: Message) -> dict[str, Any]:
    """Convert a message to the form that templates expect: text, and tool arguments as objects."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_text(part) for part in content)
    result = {**message, "content": content or ""}
    calls = message.get("tool_calls")
    if function := message.get("function_call"):  # OpenAI's older form of a call and its result
        calls = [{"type": "function", "function": function}]
    if message.get("role") == "function":
        result["role"] = "tool"
    if calls:
        result["tool_calls"] = [_tool_call(call) for call in calls]
    else:
        result.pop("tool_calls", None)
    return result


def _text(part: Mapping[str, Any] | str) -> str:
    if isinstance(part, str):  # LangChain's lists may hold plain texts
        return part
    if part.get("type") not in ("text", "refusal"):
        raise Unsupported(
            f"Message content of type `{part.get('type')}` is not supported",
            hint="Send text only",
        )
    return str(part.get("text") or part.get("refusal") or "")


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    if isinstance(function.get("arguments"), str):
        # Arguments that are not JSON reach the template as the model wrote them.
        with contextlib.suppress(ValueError, RecursionError):
            function["arguments"] = json.loads(function["arguments"] or "{}")
    return {**call, "function": function}
