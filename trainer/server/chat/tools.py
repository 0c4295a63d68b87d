"""The tools of a chat request: which functions its answer may call, and whether it must."""

import re
from dataclasses import dataclass
from typing import Any

from kit.types import Json
from trainer.errors import BadRequest, Unsupported

MAX_TOOLS = 128  # OpenAI's limits
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_OWN_FUNCTION = "Give the agent a function that does the same; it runs beside the agent"


@dataclass(frozen=True)
class ToolUse:
    """The functions that an answer may call, and how."""

    functions: tuple[Json, ...] = ()
    required: bool = False
    """Whether the answer must be a call."""
    named: bool = False
    """Whether the request names the one function to call."""
    parallel: bool = True
    """Whether one answer may have several calls."""
    restricted: bool = False
    """Whether the model sees functions that it must not call."""

    @property
    def strict(self) -> bool:
        return any(function.get("strict") for function in self.functions)


def tool_use(tools: list[Json] | None, choice: Any, parallel: bool | None) -> ToolUse:
    """Check `tools`, `tool_choice` and `parallel_tool_calls` of a request."""
    functions = _functions(tools or [])
    parallel = parallel is not False
    match choice:
        case None | "auto":
            return ToolUse(functions, parallel=parallel)
        case "none":
            return ToolUse()
        case "required" | "any":  # `any` is Mistral's word, which several frameworks send
            return ToolUse(_at_least_one(functions), required=True, parallel=parallel)
        case {"function": {"name": str(name)}}:
            chosen = _select(functions, [name])
            return ToolUse(chosen, required=True, named=True, parallel=False)
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(allowed)}}:
            if mode not in ("auto", "required"):
                raise BadRequest(
                    f"`tool_choice.allowed_tools.mode` is `{mode}`",
                    hint="Use `auto` or `required`",
                    param="tool_choice",
                )
            chosen = _select(functions, [_allowed_name(tool) for tool in allowed])
            return ToolUse(
                _at_least_one(chosen),
                required=mode == "required",
                parallel=parallel,
                restricted=len(chosen) < len(functions),
            )
        case {"type": "custom"}:
            raise Unsupported(
                "`tool_choice` of type `custom` is not supported",
                hint="Define the tool as a function",
                param="tool_choice",
            )
    raise BadRequest(
        f"`tool_choice` is `{choice}`",
        hint="Use `auto`, `none`, `required`, "
        '`{"type": "function", "function": {"name": NAME}}` or `allowed_tools`',
        param="tool_choice",
    )


def _functions(tools: list[Json]) -> tuple[Json, ...]:
    if len(tools) > MAX_TOOLS:
        raise BadRequest(
            f"The request has {len(tools)} tools, more than {MAX_TOOLS}",
            hint="Offer fewer tools to the agent at a time",
            param="tools",
        )
    functions = tuple(_function(place, tool) for place, tool in enumerate(tools))
    names = [function["name"] for function in functions]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise BadRequest(
            f"`tools` has the function `{twice}` twice", hint="Rename one of them", param="tools"
        )
    return functions


def _function(place: int, tool: Json) -> Json:
    kind, function = tool.get("type", "function"), tool.get("function")
    where = f"tools[{place}]"
    if kind == "custom":
        raise Unsupported(
            f"`{where}` is a `custom` tool, which is not supported",
            hint='Define it as a function with one string, `{"input": …}`',
            param=where,
        )
    if kind != "function":
        raise Unsupported(
            f"`{where}` has the type `{kind}`, a hosted tool, which is not supported",
            hint=_OWN_FUNCTION,
            param=where,
        )
    if not isinstance(function, dict):
        raise BadRequest(
            f"`{where}` has no `function`",
            hint='Send `{"type": "function", "function": {"name", "description", "parameters"}}`',
            param=where,
        )
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise BadRequest(
            f"`{where}.function.name` is `{name}`",
            hint="Use up to 64 letters, digits, `_` and `-`",
            param=f"{where}.function.name",
        )
    if not isinstance(function.get("parameters") or {}, dict):
        raise BadRequest(
            f"`{where}.function.parameters` is not an object",
            hint="Send a JSON schema",
            param=f"{where}.function.parameters",
        )
    return function


def _allowed_name(tool: Any) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
        case {"type": "function", "name": str(name)}:
            return name
    raise BadRequest(
        f"`tool_choice.allowed_tools.tools` holds `{tool}`",
        hint='Send `{"type": "function", "function": {"name": NAME}}`',
        param="tool_choice",
    )


def _select(functions: tuple[Json, ...], names: list[str]) -> tuple[Json, ...]:
    by_name = {function["name"]: function for function in functions}
    for name in names:
        if name not in by_name:
            raise BadRequest(
                f"`tool_choice` names `{name}`, which is not in `tools`",
                hint=f"Use one of {', '.join(by_name)}" if by_name else "Send it in `tools`",
                param="tool_choice",
            )
    return tuple(function for function in functions if function["name"] in names)


def _at_least_one(functions: tuple[Json, ...]) -> tuple[Json, ...]:
    if not functions:
        raise BadRequest(
            "`tool_choice` requires a call, but there is no tool",
            hint="Send `tools`, or leave `tool_choice` out",
            param="tool_choice",
        )
    return functions
