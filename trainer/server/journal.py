"""The journal makes a step a transaction: what was asked is on disk before the first gradient.

One file a model, of its newest step. A server that is killed finds it at its next start and
trains the step again, or, where the checkpoint is there, only delivers what was lost.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.pieces import parse, pieces

Json = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """A train request as it was journaled, with the exact tokens of its choices."""

    step: int
    """The step that it makes."""
    digest: str
    base_model: str
    model: Json
    groups: list[Json]
    config: Json


class Journal:
    """The newest train request of one model, until its answer was delivered."""

    def __init__(self, directory: Path) -> None:
        self._request = directory / "journal.json"
        self._rows = directory / "journal.rows.jsonl"

    def begin(self, request: Request) -> None:
        """Write the request down, durably; only then may it be trained."""
        self._request.parent.mkdir(parents=True, exist_ok=True)
        self._rows.unlink(missing_ok=True)
        temporary = self._request.with_suffix(".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(pieces(vars(request)))
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(self._request)
        handle = os.open(self._request.parent, os.O_RDONLY)
        try:
            os.fsync(handle)  # the rename itself
        finally:
            os.close(handle)

    @property
    def is_pending(self) -> bool:
        """Whether there is a request whose answer was not delivered."""
        return self._request.is_file()

    def pending(self) -> Request | None:
        """The request whose answer was not delivered, if there is one."""
        try:
            return Request(**parse(self._request.read_bytes()))
        except FileNotFoundError:
            return None

    def row(self, row: Json) -> None:
        with self._rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def rows(self) -> list[Json]:
        """What was streamed so far; a line that was cut off is left out."""
        if not self._rows.is_file():
            return []
        text = self._rows.read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def restart(self) -> None:
        """Forget the rows of an attempt that did not reach its checkpoint."""
        self._rows.unlink(missing_ok=True)

    def delivered(self) -> None:
        """The client has its answer: the same body from now on is a new request."""
        self._request.unlink(missing_ok=True)
        self._rows.unlink(missing_ok=True)
