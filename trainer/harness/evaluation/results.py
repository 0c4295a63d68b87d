"""The file of an evaluation, `evals/NAME.jsonl`: settings, one line per run, summaries.

Lines are only ever appended, so an interrupted evaluation continues where it stopped. A reader
takes the last line for each run, and the last summary.
"""

import fcntl
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

from kit import json_text
from kit.errors import ConfigError
from kit.types import Json
from trainer.errors import storage_error
from trainer.harness.metrics import clean, json_line
from trainer.harness.types import Example
from trainer.page.evals import RUN, SETTINGS, SUMMARY

LONGEST_OUTPUT = 20_000
"""Characters of an output that are kept."""
Key = tuple[str, str, int]
"""Model, example and generation."""


class Results:
    """One file, locked while it is open."""

    def __init__(self, path: Path, settings: Json, *, fresh: bool = False) -> None:
        self.path = path
        self._digests: dict[str, str] = {}
        self.runs: dict[Key, Json] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] = path.open("a+", encoding="utf-8")
        except OSError as error:
            raise storage_error(error, f"The results `{path}` cannot be written") from error
        try:
            self._lock()
            if fresh:
                self._start_over()
            self._read(settings)
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"Another evaluation is writing to `{self.path}`",
                hint="Wait until it ends, or choose another `--name`",
            ) from None

    def _start_over(self) -> None:
        """Begin another file: a reader that follows the old one notices."""
        old = self._file
        self.path.unlink(missing_ok=True)
        self._file = self.path.open("a+", encoding="utf-8")
        old.close()
        self._lock()

    def _read(self, settings: Json) -> None:
        self._file.seek(0)
        text = self._file.read()
        if text and not text.endswith("\n"):
            self._file.write("\n")  # a killed program left half a line
        known = None
        for line in text.split("\n"):
            try:
                row = json_text.parse(line)
                kind = row.get("kind")
                if kind == SETTINGS:
                    known = row["settings"]
                elif kind == RUN:
                    self._remember(row)
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # a damaged line: its run is done again
        if known is None:
            self._append([{"kind": SETTINGS, "settings": settings}])
            return
        different = [name for name in settings if known.get(name) != clean(settings[name])]
        if self.runs and different:
            names = ", ".join(f"`{name}`" for name in different)
            raise ConfigError(
                f"`{self.path}` holds an evaluation with other settings: {names}",
                hint="Choose another `--name`, or start over with `--fresh`",
            )

    def _remember(self, row: Json) -> None:
        self.runs[str(row["model"]), str(row["id"]), int(row["generation"])] = row
        self._digests[str(row["id"])] = str(row["digest"])

    def check(self, examples: Iterable[Example]) -> None:
        """Raise if an example has changed since it was run."""
        for example in examples:
            if self._digests.get(example.id, digest(example)) != digest(example):
                raise ConfigError(
                    f"Example `{example.id}` has changed since it was run for `{self.path}`",
                    hint="Choose another `--name`, or start over with `--fresh`",
                )

    def is_done(self, model: str, example: Example, generations: int) -> bool:
        """Whether every run of the example has a reward. A group is run as a whole."""
        rows = [self.runs.get((model, example.id, number)) for number in range(generations)]
        return all(row is not None and row["failure"] is None for row in rows)

    def rows(self, model: str, examples: Sequence[Example], generations: int) -> list[Json]:
        """The rows of a model, in the order of the examples."""
        keys = ((model, one.id, number) for one in examples for number in range(generations))
        return [self.runs[key] for key in keys if key in self.runs]

    def add(self, model: str, example: Example, rows: Iterable[Json]) -> None:
        """Append the runs of one example."""
        mark = {"kind": RUN, "model": model, "digest": digest(example)}
        added = [{**mark, **row, "output": _short(row["output"])} for row in rows]
        self._append(added)
        for row in added:
            self._remember(row)

    def finish(self, summary: Json) -> None:
        self._append([{"kind": SUMMARY, **summary}])

    def _append(self, rows: Iterable[Json]) -> None:
        try:
            self._file.writelines(json_line(row) + "\n" for row in rows)
            self._file.flush()
        except OSError as error:
            raise storage_error(error, f"The results `{self.path}` cannot be written") from error

    def close(self) -> None:
        self._file.close()


def digest(example: Example) -> str:
    """Tells whether an example is still the one that was run."""
    text = json.dumps(dict(example.row), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _short(output: object) -> object:
    return output[:LONGEST_OUTPUT] if isinstance(output, str) else output
