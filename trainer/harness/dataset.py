"""Examples out of a file, every fault of the file told at once with its line."""

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kit.errors import ConfigError
from trainer.harness.components import CustomConfig, JsonDataset
from trainer.harness.types import Example
from trainer.harness.user_code import instance

_TOLD = 5  # faults that are spelled out; the rest is counted


def load_examples(dataset: JsonDataset | CustomConfig, path: Path | None = None) -> list[Example]:
    """The dataset's examples; `path` is another file of the same structure.

    A dataset of the user's own is `_type: module:callable`; called, it yields mappings.
    """
    if isinstance(dataset, CustomConfig) and path is None:
        rows = ((number, row) for number, row in enumerate(instance(dataset), 1))
        return _examples(rows, dataset.type, JsonDataset(_type="json", file_path=Path()))
    if isinstance(dataset, CustomConfig):
        assert path is not None
        dataset = JsonDataset(_type="json", file_path=path)
    file = path or dataset.file_path
    kind = file.suffix.lstrip(".") if path else dataset.type
    faults: list[str] = []
    examples = _examples(_rows(file, kind, faults), str(file), dataset, faults)
    return examples


def _rows(file: Path, kind: str, faults: list[str]) -> Iterator[tuple[int, Any]]:
    """(line or number, entry) of every entry that can be read."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"The dataset `{file}` cannot be read: {exc}",
            hint="Check `eval.general.dataset.file_path` and where you run the command",
        ) from exc
    if kind == "csv":
        yield from enumerate(csv.DictReader(io.StringIO(text, newline="")), 2)
        return
    if kind == "json" and text.lstrip().startswith("["):
        try:
            yield from enumerate(json.loads(text), 1)
        except json.JSONDecodeError as exc:
            faults.append(f"line {exc.lineno}: not valid JSON ({exc.msg})")
        return
    for number, line in enumerate(text.split("\n"), 1):  # a JSON string may hold U+2028
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except json.JSONDecodeError as exc:
            faults.append(f"line {number}: not valid JSON ({exc.msg})")


def _examples(
    rows: Iterator[tuple[int, Any]],
    source: str,
    dataset: JsonDataset,
    faults: list[str] | None = None,
) -> list[Example]:
    faults = [] if faults is None else faults
    keys = (dataset.id_key, dataset.structure.question_key, dataset.structure.answer_key)
    seen: dict[str, int] = {}
    examples = []
    for number, row in rows:
        if not isinstance(row, dict):
            faults.append(f"entry {number}: not an object but `{row!r:.40}`")
            continue
        # Not every task has an answer to compare with, so that it alone may be absent.
        absent = [key for key in keys[:2] if row.get(key) in (None, "")]
        if absent:
            names = ", ".join(f"`{key}`" for key in absent)
            faults.append(f"entry {number}: {names} is missing")
            continue
        name = str(row[keys[0]])
        if name in seen:
            faults.append(f"entry {number}: the id `{name}` is that of entry {seen[name]} too")
            continue
        seen[name] = number
        examples.append(Example(name, row[keys[1]], row.get(keys[2]), row))
    if faults:
        more = f"; and {len(faults) - _TOLD} more" if len(faults) > _TOLD else ""
        raise ConfigError(
            f"The dataset `{source}` has {len(faults)} fault{'s' * (len(faults) > 1)}: "
            + "; ".join(faults[:_TOLD])
            + more,
            hint="Mend the file, or set `id_key` and `structure` of the dataset",
        )
    if not examples:
        raise ConfigError(f"The dataset `{source}` is empty", hint="Give at least one example")
    return examples
