"""Reads examples from a dataset, and reports all faults in it at once with their lines."""

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kit import json_text
from kit.errors import ConfigError, plural
from trainer.harness.components import CustomConfig, FileDatasetConfig
from trainer.harness.types import Example
from trainer.harness.user_code import create_component
from trainer.harness.user_texts import error_text

_MAX_REPORTED = 5  # faults that the error lists; the rest are counted


def load_examples(
    dataset: FileDatasetConfig | CustomConfig, path: Path | None = None
) -> list[Example]:
    """Read the dataset's examples, or those of `path`, a file with the same structure.

    The user's own dataset is `_type: module:callable`. Calling it yields mappings.
    """
    if isinstance(dataset, CustomConfig) and path is None:
        return _examples(
            _own_rows(dataset), dataset.type, FileDatasetConfig(_type="json", file_path=Path())
        )
    if isinstance(dataset, CustomConfig):
        assert path is not None
        dataset = FileDatasetConfig(_type="json", file_path=path)
    file = path or dataset.file_path
    kind = file.suffix.lstrip(".") if path else dataset.type
    faults: list[str] = []
    return _examples(_rows(file, kind, faults), str(file), dataset, faults)


def _own_rows(dataset: CustomConfig) -> Iterator[tuple[int, Any]]:
    """Yield the entries of the user's own dataset, whose code may fail anywhere."""
    entries = create_component(dataset)
    try:
        yield from enumerate(entries, 1)
    except GeneratorExit:
        raise
    except (Exception, SystemExit) as exc:
        raise ConfigError(
            f"The dataset `{dataset.type}` failed: {error_text(exc)}", hint="Fix its code"
        ) from exc


def _rows(file: Path, kind: str, faults: list[str]) -> Iterator[tuple[int, Any]]:
    """Yield (line or entry number, entry) for every entry that can be parsed."""
    try:
        text = file.read_text(encoding="utf-8-sig")  # Excel starts files with a mark
    except UnicodeDecodeError as exc:
        raise ConfigError(
            f"The dataset `{file}` is not encoded as UTF-8: {exc}", hint="Save it as UTF-8"
        ) from exc
    except OSError as exc:
        raise ConfigError(
            f"Cannot read the dataset `{file}`: {exc}",
            hint="Check `eval.general.dataset.file_path` and the working directory",
        ) from exc
    if kind == "csv":
        yield from _csv_rows(text, faults)
        return
    if kind == "json" and text.lstrip().startswith("["):
        try:
            yield from enumerate(json_text.parse(text), 1)
        except json.JSONDecodeError as exc:
            faults.append(f"line {exc.lineno}: not valid JSON ({exc.msg})")
        return
    # Not splitlines(): JSON strings may contain U+2028.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield number, json_text.parse(line)
        except json.JSONDecodeError as exc:
            faults.append(f"line {number}: not valid JSON ({exc.msg})")


def _csv_rows(text: str, faults: list[str]) -> Iterator[tuple[int, Any]]:
    """Yield (line, row). A row over several lines is known by its last one."""
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        for row in reader:
            if None in row:  # values in the wrong columns, most likely
                faults.append(
                    f"line {reader.line_num}: more values than columns (quote values with commas)"
                )
            else:
                yield reader.line_num, row
    except csv.Error as exc:
        # `line_num` is still that of the row before. A quote that is never closed makes one field
        # of all that follows it, so the line where this row starts is the one to look at.
        start = reader.line_num + 1
        faults.append(f"line {start}: not valid CSV ({exc}; close its quotes, or use JSON Lines)")


def _examples(
    rows: Iterator[tuple[int, Any]],
    source: str,
    dataset: FileDatasetConfig,
    faults: list[str] | None = None,
) -> list[Example]:
    faults = [] if faults is None else faults
    keys = (dataset.id_key, dataset.structure.question_key, dataset.structure.answer_key)
    seen: dict[str, int] = {}
    examples = []
    for number, row in rows:
        if not isinstance(row, dict):
            faults.append(f"entry {number}: expected an object, found `{row!r:.40}`")
            continue
        # The answer is optional: some tasks have none to compare with.
        missing = [key for key in keys[:2] if row.get(key) in (None, "")]
        if missing:
            names = ", ".join(f"`{key}`" for key in missing)
            faults.append(f"entry {number}: missing {names}")
            continue
        name = str(row[keys[0]])
        if name in seen:
            faults.append(f"entry {number}: same id `{name}` as entry {seen[name]}")
            continue
        seen[name] = number
        examples.append(Example(name, row[keys[1]], row.get(keys[2]), row))
    if faults:
        rest = len(faults) - _MAX_REPORTED
        more = f"; and {rest} more" if rest > 0 else ""
        raise ConfigError(
            f"The dataset `{source}` has {plural(len(faults), 'fault')}: "
            + "; ".join(faults[:_MAX_REPORTED])
            + more,
            hint="Fix the file, or set the dataset's `id_key` and `structure`",
        )
    if not examples:
        raise ConfigError(f"The dataset `{source}` is empty", hint="Add at least one example")
    return examples
