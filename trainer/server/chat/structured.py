"""Structured output: turns the fields that request it into a constraint for the engine.

`response_format` is OpenAI's. `structured_outputs`, and the older `guided_json` and its siblings,
are vLLM's.
"""

import json
from typing import Any

from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from kit.types import Json
from trainer.engines.constraints import JSON_STYLE, without_unknown_formats
from trainer.engines.engine import Constraint
from trainer.errors import BadRequest, Unsupported
from trainer.server.chat.tool_grammar import tool_grammar
from trainer.server.chat.tools import NAME, ToolUse

GUIDED = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}
_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_NEUTRAL_OPTIONS = ("disable_any_whitespace", "disable_fallback")


def constraint(
    response_format: Json | None, structured_outputs: Json | None, use: ToolUse
) -> Constraint | None:
    """The constraint of a request, or None. A required call leaves no text to be formatted."""
    own = _structured_outputs(structured_outputs) if structured_outputs else None
    schema = None if response_format is None else _schema(response_format)
    if own and (schema is not None or use.required):
        other = "response_format" if schema is not None else "tool_choice"
        raise BadRequest(
            f"`structured_outputs` and `{other}` contradict each other",
            hint="Send one of them",
            param="structured_outputs",
        )
    if own:  # as in vLLM it is the form of the whole answer, and tools are called if it allows
        return own
    limited = use.required or use.strict or use.restricted or not use.parallel
    if use.functions and (limited or schema is not None):
        return Constraint("grammar", tool_grammar(use, schema))
    if schema is not None:
        return Constraint("json_schema", json.dumps(schema))
    return None


def _schema(response_format: Json) -> Json | None:
    """The JSON schema of `response_format`, or None for text."""
    match response_format:
        case {"type": "text"}:
            return None
        case {"type": "json_object", "schema": dict(schema)}:  # of Together and llama.cpp
            return _with_style(schema, strict=False)
        case {"type": "json_object"}:
            return _with_style({"type": "object"}, strict=True)
        case {"type": "json_schema", "json_schema": {"schema": dict(schema), **rest}}:
            name = rest.get("name")
            if name is not None and not (isinstance(name, str) and NAME.fullmatch(name)):
                raise BadRequest(
                    f"`response_format.json_schema.name` is `{name}`",
                    hint="Use up to 64 letters, digits, `_` and `-`",
                    param="response_format.json_schema.name",
                )
            return _with_style(schema, strict=bool(rest.get("strict")))
        case {"type": "json_schema"}:
            raise BadRequest(
                "`response_format` has no `json_schema.schema`",
                hint='Send `{"type": "json_schema", "json_schema": {"name", "schema"}}`',
                param="response_format.json_schema",
            )
    raise Unsupported(
        f"`response_format` of type `{response_format.get('type')}` is not supported",
        hint="Use `json_schema`, `json_object` or `text`, or vLLM's `structured_outputs`",
        param="response_format.type",
    )


def _structured_outputs(fields: Json) -> Constraint | None:
    given = {name: value for name, value in fields.items() if value not in (None, False)}
    for name in given.keys() - set(_KINDS) - set(_NEUTRAL_OPTIONS):
        raise Unsupported(
            f"`structured_outputs.{name}` is not supported",
            hint=f"Use one of {_names()}",
            param=f"structured_outputs.{name}",
        )
    kinds = [kind for kind in _KINDS if kind in given]
    if len(kinds) != 1:
        raise BadRequest(
            f"`structured_outputs` has {len(kinds)} of {_names()}, instead of one",
            hint="Send exactly one of them",
            param="structured_outputs",
        )
    return _constraint_of(kinds[0], given[kinds[0]])


def _names() -> str:
    return ", ".join(f"`{kind}`" for kind in _KINDS)


def _constraint_of(kind: str, value: Any) -> Constraint:
    match kind, value:
        case "json", dict():
            return Constraint("json_schema", json.dumps(_with_style(value, strict=False)))
        case "json", str():
            return _constraint_of(kind, _parsed(value))
        case "json_object", True:
            schema = _with_style({"type": "object"}, strict=True)
            return Constraint("json_schema", json.dumps(schema))
        case "regex", str():
            return Constraint("regex", value)
        case "grammar", str():
            return Constraint("grammar", _lark(value))
        case "choice", [str(), *rest] if all(isinstance(each, str) for each in rest):
            return Constraint("choice", json.dumps(value))
    raise BadRequest(
        f"`structured_outputs.{kind}` is `{value}`",
        hint="Send a schema as `json`, a string as `regex` or `grammar`, a list as `choice`",
        param=f"structured_outputs.{kind}",
    )


def _lark(grammar: str) -> str:
    """A grammar in Lark; vLLM also takes llama.cpp's form, whose rules are `name ::= …`."""
    if "::=" not in grammar:
        return grammar
    try:
        return str(gbnf_to_lark(grammar))
    except GbnfToLarkError as error:
        raise BadRequest(
            f"`structured_outputs.grammar` cannot be read: {error}",
            hint="Write it in Lark, or in llama.cpp's GBNF with the rule `root`",
            param="structured_outputs.grammar",
        ) from error


def _parsed(text: str) -> Json:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise BadRequest(
            "`structured_outputs.json` is not a JSON schema",
            hint="Send an object, or an object as a string",
            param="structured_outputs.json",
        )
    return value


def _with_style(schema: Json, *, strict: bool) -> Json:
    """Keywords that the grammar library does not know are an error only if the schema is strict."""
    known = without_unknown_formats(schema)
    return {**known, "x-guidance": {**JSON_STYLE, "lenient": not strict}}
