"""Metrics of an epoch, and reading and writing the files that hold them."""

import json
import math
import os
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kit.types import Json
from trainer.harness.user_texts import text_of


def reward_summary(rewards: Sequence[float], prefix: str = "") -> dict[str, float]:
    """Return mean, minimum, maximum and standard deviation, or nothing if there are no rewards."""
    if not rewards:
        return {}
    return {
        f"{prefix}avg_reward": statistics.fmean(rewards),
        f"{prefix}min_reward": min(rewards),
        f"{prefix}max_reward": max(rewards),
        f"{prefix}reward_std_dev": statistics.pstdev(rewards),
    }


def write_json(path: Path, value: Any) -> None:
    """Replace `path` with a value, in lines for a reader."""
    replace_file(path, json.dumps(clean(value), indent=2))


def replace_file(path: Path, text: str) -> None:
    """Replace `path` atomically: a kill leaves the old or the new file, never a partial one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_jsonl(path: Path, rows: Iterable[Json]) -> None:
    """Replace `path` with a file of one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(json_line(row) + "\n" for row in rows)
    temporary.replace(path)


def plain(row: Json) -> Json:
    """Return a row as it reads in a file: JSON alone, whatever an agent put into it."""
    read: Json = json.loads(json_line(row))
    return read


def json_line(row: Json) -> str:
    """A row as JSON. An agent may output any object, which must not make the epoch fail."""
    try:
        return _json(row)
    except Exception:  # an object without an end, or a number too long to print
        return json.dumps({name: _or_text(value) for name, value in row.items()})


def _json(value: Any) -> str:
    return json.dumps(clean(value), default=text_of)


def _or_text(value: Any) -> Any:
    """The value as JSON has it, or its text: the other fields of a row keep their types."""
    try:
        return json.loads(_json(value))
    except Exception:
        return text_of(value)


def read_json(path: Path, default: Any) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else default


def read_jsonl(path: Path) -> list[Json]:
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def clean(value: Any) -> Any:
    """Replace NaN and infinities by None, because JSON has neither."""
    if isinstance(value, dict):
        return {text_of(name): clean(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [clean(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
