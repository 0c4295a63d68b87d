"""Reads the JSON files of models and LoRAs, and says in one sentence what is wrong with one."""

import json
from pathlib import Path
from typing import Any

from trainer.errors import ModelError, TrainerError

AGAIN = "Download the model again"


def read_object(
    path: Path, error: type[TrainerError] = ModelError, hint: str = AGAIN
) -> dict[str, Any]:
    """Read a JSON object. Raises `error`, which names the file, for anything else."""
    try:
        value = json.loads(path.read_bytes().decode())
    except FileNotFoundError:
        raise error(f"`{path.parent}` has no `{path.name}`", hint=hint) from None
    except OSError as exc:
        raise error(f"`{path}` cannot be read: {exc.strerror or exc}", hint=hint) from exc
    except (ValueError, RecursionError) as exc:
        raise error(f"`{path}` is not JSON: {exc}", hint=hint) from exc
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise error(f"`{path}` holds a JSON value of type `{kind}`, not an object", hint=hint)
    return value


class Numbers:
    """The numbers in an object of a file; a value of another kind is a ValueError that names it."""

    def __init__(self, values: dict[str, Any], place: str = "") -> None:
        self._values = values
        self._place = place

    def whole(self, name: str, default: int | None = None, most: int = 1 << 24) -> int:
        """An integer from 1 to `most`. Without a default, a missing one is a KeyError."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ValueError(
                f"has `{self._place}{name}` `{value!s:.60}`, which is no whole number "
                f"from 1 to {most}"
            )
        return value

    def real(self, name: str, default: float | None = None) -> float:
        """A number above 0 and below 1e12."""
        value = self._get(name, default)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value < 1e12:
            raise ValueError(
                f"has `{self._place}{name}` `{value!s:.60}`, which is no number above 0"
            )
        return float(value)

    def _get(self, name: str, default: float | None) -> Any:
        value = self._values.get(name)
        if value is None and default is None:
            raise KeyError(name)
        return default if value is None else value
