"""Tables of settings for `docs/reference.md`, from pydantic's models."""

import json
import re
import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from kit.config import Config
from kit.settings import variables

BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}
NAMES = {"integer": "integer", "number": "number", "boolean": "true or false", "null": ""}


def one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def describe(model: type[BaseModel]) -> str:
    """The model's docstring as a paragraph; nothing if it has none of its own."""
    text = model.__doc__ if "__doc__" in vars(model) else None
    return f"{one_line(text)}\n\n" if text else ""


def settings_table(
    model: type[BaseModel], *, base: type[BaseModel] | None = None, at: str = ""
) -> str:
    """One row per setting; those that `model` inherits from `base` are left to its own table.

    `at` is the model's path in its file. A setting that holds further settings links to their
    heading, which is their path.
    """
    schema = model.model_json_schema()
    env = variables(model) if issubclass(model, Config) else {}
    inherited = set(base.model_fields) if base and issubclass(model, base) else set()
    head = ["Setting", "Type", "Default", *(["Variable"] if env else []), "Description"]
    rows = []
    for name, field in model.model_fields.items():
        if name in inherited:
            continue
        written = field.alias or name
        prop = schema["properties"][written]
        kind = _type(prop, schema)
        if path := _child_path(field, f"{at}.{name}" if at else name):
            kind = kind.replace("settings", f"[settings](#{slug(path)})")
        cells = [f"`{written}`", kind, _default(field)]
        cells += [f"`{env[name]}`" if name in env else ""] if env else []
        rows.append([*cells, one_line(field.description or "")])
    if not rows:
        return ""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _type(prop: dict[str, Any], schema: dict[str, Any]) -> str:
    if "anyOf" in prop or "oneOf" in prop:
        found = [_type(each, schema) for each in prop.get("anyOf") or prop["oneOf"]]
        return " or ".join(dict.fromkeys(name for name in found if name))
    if "$ref" in prop:
        return "settings"
    if choices := prop.get("enum") or ([prop["const"]] if "const" in prop else []):
        return ", ".join(f"`{choice}`" for choice in choices)
    kind = prop.get("type")
    if kind == "array":
        return f"list of {_type(prop.get('items', {}), schema)}"
    if kind == "object":
        values = prop.get("additionalProperties")
        inner = _type(values, schema) if isinstance(values, dict) else ""
        return f"mapping of name to {inner}" if inner else "mapping"
    if kind == "string":
        return {"password": "secret", "path": "path"}.get(prop.get("format", ""), "text")
    name = NAMES.get(str(kind), "any value")
    if "minimum" in prop and "maximum" in prop:
        return f"{name} from {prop['minimum']} to {prop['maximum']}"
    bounds = [f"{word} {prop[key]:g}" for key, word in BOUNDS.items() if key in prop]
    return ", ".join([name, *bounds])


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return ""
    if value is None:
        return "`null`"
    if isinstance(value, SecretStr):
        return f"`{value.get_secret_value()}`"
    if isinstance(value, list | tuple):
        return ", ".join(f"`{item}`" for item in value) or "`[]`"
    if isinstance(value, bool | dict):
        return f"`{json.dumps(value)}`"
    return f"`{value}`"


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and the site make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def sections(model: type[BaseModel], at: str = "") -> Iterator[tuple[str, list[type[Config]]]]:
    """The path of every group of settings in a file, and the models that it may hold."""
    for name, field in model.model_fields.items():
        path = _child_path(field, f"{at}.{name}" if at else name)
        models = [each for each in _models(field.annotation)[0] if issubclass(each, Config)]
        if path and models:
            yield path, models
        for each in models:
            yield from sections(each, path)


def _child_path(field: FieldInfo, path: str) -> str:
    """The path of the settings that a field holds; empty if it holds none."""
    found, is_mapping = _models(field.annotation)
    if not found:
        return ""
    return f"{path}.NAME" if is_mapping else path


def _models(annotation: Any) -> tuple[list[type[BaseModel]], bool]:
    """The models in an annotation, and whether they are the values of a mapping."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(annotation, type) and not arguments and issubclass(annotation, BaseModel):
        return [annotation], False
    if origin is dict:
        return _models(arguments[1])[0], True
    if origin is typing.Annotated:
        return _models(arguments[0])
    if origin in (typing.Union, types.UnionType):
        found = [model for each in arguments for model in _models(each)[0]]
        return list(dict.fromkeys(found)), False
    return [], False
