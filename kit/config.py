"""Strict configuration: unknown keys are refused, and one error lists every fault.

`load` reads a YAML file into a model and names the line of each fault.
"""

import difflib
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import pydantic

from kit.errors import ConfigError, plural
from kit.yaml_files import Location, read_yaml, shortened

MAX_FAULTS = 10  # in one message


class Config(pydantic.BaseModel):
    """Base class of every configuration: refuses unknown keys and cannot be changed."""

    model_config = pydantic.ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )


ConfigT = TypeVar("ConfigT", bound=pydantic.BaseModel)


def load(model: type[ConfigT], path: Path) -> ConfigT:
    """Read `path` into `model`. An error lists every fault with its line."""
    data, lines = read_yaml(path)
    return validate(model, data, source=str(path), lines=lines)


def validate(
    model: type[ConfigT],
    data: Any,
    *,
    source: str,
    lines: dict[Location, int] | None = None,
) -> ConfigT:
    """Build `model` from `data`. Errors name `source` as the origin of the data."""
    try:
        return model.model_validate(data)
    except pydantic.ValidationError as exc:
        raise _config_error(exc, model, source=source, lines=lines or {}) from exc


def _config_error(
    exc: pydantic.ValidationError,
    model: type[pydantic.BaseModel],
    *,
    source: str,
    lines: dict[Location, int],
) -> ConfigError:
    """Translate pydantic's errors into one message, with the closest name for each typo."""
    faults = []
    errors = exc.errors(include_url=False)
    for error in errors[:MAX_FAULTS]:
        place = _as_written(tuple(error["loc"]), lines)
        name = shortened(".".join(str(part) for part in place)) or "the whole file"
        line = _nearest_line(place, lines)
        faults.append((f"line {line}: " if line else "") + f"`{name}` {_explain(error, model)}")
    more = [f"and {len(errors) - MAX_FAULTS} more"] if len(errors) > MAX_FAULTS else []
    return ConfigError(
        f"`{source}` has {plural(len(errors), 'fault')}: " + "; ".join(faults + more),
        hint=f"Fix {'it' if len(errors) == 1 else 'them'} and try again",
    )


def _explain(error: Any, model: type[pydantic.BaseModel]) -> str:
    if error["type"] == "extra_forbidden":
        return "is not a setting" + _nearest(error["loc"][-1], _names_at(model, error["loc"][:-1]))
    if error["type"] == "missing":
        return "is required"
    if error["type"] == "union_tag_invalid":
        tags = error["ctx"]["expected_tags"].replace("'", "").split(", ")
        tag = error["ctx"]["tag"]
        known = ", ".join(f"`{name}`" for name in tags)
        return f"has the type `{shortened(tag)}`, which is none of {known}" + _nearest(tag, tags)
    told = shortened(error["msg"])
    return f"{told[0].lower()}{told[1:]} (got `{shortened(repr(error['input']))}`)"


def _as_written(place: Location, lines: dict[Location, int]) -> Location:
    """Drop the tags that pydantic inserts into a location for the members of a union."""
    if not lines:
        return place
    path: Location = ()
    for index, part in enumerate(place):
        if (*path, part) in lines or index == len(place) - 1:
            path = (*path, part)
    return path


def _nearest_line(place: Location, lines: dict[Location, int]) -> int | None:
    while place:
        if place in lines:
            return lines[place]
        place = place[:-1]
    return None


def _nearest(name: str | int, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(name)[:100], list(known), n=1)
    return f", did you mean `{near[0]}`?" if near else ""


def _names_at(model: type[pydantic.BaseModel], place: Location) -> list[str]:
    """Names of the settings at `place`; empty if there is no model at that place."""
    annotation: Any = model
    for part in place:
        annotation = _child(annotation, str(part))
    models = [member for member in _members(annotation) if _is_model(member)]
    return [field.alias or name for found in models for name, field in found.model_fields.items()]


def _child(annotation: Any, part: str) -> Any:
    for member in _members(annotation):
        if _is_model(member):
            for name, field in member.model_fields.items():
                if part in (name, field.alias):
                    return field.annotation
        elif typing.get_origin(member) is dict:
            return typing.get_args(member)[1]
    # `part` may be the tag of a union's member; the next part then names a field of that member.
    for member in _members(annotation, keep_tags=True):
        if any(getattr(mark, "tag", None) == part for mark in getattr(member, "__metadata__", ())):
            return member
    return None


def _members(annotation: Any, *, keep_tags: bool = False) -> list[Any]:
    """The members of a union, or the annotation itself if it is not a union."""
    while typing.get_origin(annotation) is typing.Annotated:
        if keep_tags and any(isinstance(m, pydantic.Tag) for m in annotation.__metadata__):
            return [annotation]
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [
            found
            for member in typing.get_args(annotation)
            for found in _members(member, keep_tags=keep_tags)
        ]
    return [annotation]


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel)
