"""Settings from several sources, in this order: flag > environment > `.env` > file > default.

A settings model is a `Config` with `Env("NAME")` on the fields that have an environment variable;
`gather` builds it.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import dotenv

from kit.config import Config, validate
from kit.errors import ConfigError

ENV_FILE = Path(".env")


@dataclass(frozen=True)
class Env:
    """Names the environment variable of a field: `field: Annotated[str, Env("NAME")]`."""

    name: str


SettingsT = TypeVar("SettingsT", bound=Config)


def variables(model: type[Config]) -> dict[str, str]:
    """The environment variable of each field that has one: `{"base_model": "BASE_MODEL"}`."""
    return {
        name: mark.name
        for name, field in model.model_fields.items()
        for mark in field.metadata
        if isinstance(mark, Env)
    }


def read_env_file(path: Path | None) -> dict[str, str]:
    """The non-empty variables in `path`, which must exist; by default those in `.env`, if any."""
    if path is None:
        path = ENV_FILE
        if not path.is_file():
            return {}
    elif not path.is_file():
        # python-dotenv returns {} for a missing file, and a run would start without its keys.
        raise ConfigError(
            f"There is no env file `{path}`",
            hint=f"Copy `.env.example` to `{path}` and fill it in",
        )
    try:
        values = dotenv.dotenv_values(path)
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"`{path}` cannot be read: {exc}", hint="Check its permissions and its encoding (UTF-8)"
        ) from exc
    return {name: value for name, value in values.items() if value}


def gather(
    model: type[SettingsT],
    *,
    flags: Mapping[str, Any] | None = None,
    env_file: Path | None = None,
    file: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> SettingsT:
    """Build `model` from all sources. A flag of None and an empty variable count as not set."""
    environment = os.environ if environment is None else environment
    dotenv_file = read_env_file(env_file)
    values: dict[str, Any] = dict(file or {})
    for field, variable in variables(model).items():
        if value := environment.get(variable) or dotenv_file.get(variable):
            values[field] = value
    values.update({name: value for name, value in (flags or {}).items() if value is not None})
    return validate(model, values, source="settings")
