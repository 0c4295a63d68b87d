"""The grammar of an answer that calls tools, for a request that restricts its calls.

It is llguidance's dialect of Lark, with calls in Hermes form: models are trained on that form, and
`trainer/server/chat/tool_calls.py` reads it.
"""

import json
from typing import Any

from kit.types import Json
from trainer.engines.constraints import JSON_STYLE, without_unknown_formats
from trainer.server.chat.tool_calls import CLOSE, OPEN
from trainer.server.chat.tools import ToolUse

# With one of these beside `properties`, other properties may be declared elsewhere in the schema.
_ELSEWHERE = {
    "$ref",
    "allOf",
    "anyOf",
    "oneOf",
    "if",
    "patternProperties",
    "dependentSchemas",
    "additionalProperties",
    "unevaluatedProperties",
}


def tool_grammar(use: ToolUse, content: Json | None = None) -> str:
    """A Lark grammar: calls as `use` allows, else free text or JSON with the schema `content`."""
    calls = "call" if not use.parallel else 'call ("\\n" call)*'
    if use.required:
        lines = [f"start: {calls}"]
    elif content is not None:
        lines = [f"start: {calls} | content", f"content: %json {json.dumps(content)}"]
    else:
        # A lazy lexeme ends the text as soon as a call opens.
        lines = [
            f"start: {'TEXT | text_call' if not use.parallel else 'text_call* TEXT'}",
            f"opened[lazy]: TEXT {_quote(OPEN)}",
            "text_call: opened inside",
            r"TEXT: /(.|\n)*/",
        ]
    lines.append(f"call: {_quote(OPEN)} inside")
    numbers = range(len(use.functions))
    lines.append("inside: " + " | ".join(f"function_{number}" for number in numbers))
    for number, function in enumerate(use.functions):
        begin = f'\n{{"name": {json.dumps(function["name"])}, "arguments": '
        schema = json.dumps(_arguments(function, forced=use.required))
        end = f"}}\n{CLOSE}"
        lines.append(f"function_{number}: {_quote(begin)} %json {schema} {_quote(end)}")
    return "%llguidance {}\n" + "\n".join(lines) + "\n"


def _arguments(function: Json, *, forced: bool) -> Json:
    """The schema of a function's arguments. An optional call of a lax function is any object."""
    strict = bool(function.get("strict"))
    schema: dict[str, Any] = {"type": "object"}
    if strict or forced:
        schema = without_unknown_formats(function.get("parameters") or {"properties": {}})
        schema.setdefault("type", "object")
        # Nobody reads an argument that is not declared, and Python's functions reject it.
        if "properties" in schema and not _ELSEWHERE & schema.keys():
            schema["additionalProperties"] = False
    # Keywords that the library does not know are an error only for a strict function.
    return {**schema, "x-guidance": {**JSON_STYLE, "lenient": not strict}}


def _quote(text: str) -> str:
    return json.dumps(text)
