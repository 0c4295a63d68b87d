"""The journal makes a step a transaction: what was asked is on disk before the first gradient.

One file a model, of its newest step. A server that is killed finds it at its next start and
trains the step again, or, where the checkpoint is there, only delivers what was lost. A request
whose answer was delivered is kept until its checkpoint is synced: a power cut loses no step.
"""

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kit.state_dir import MODEL_GLOB
from kit.types import Json
from trainer.errors import DiskFull
from trainer.processes.large_json import encode_in_pieces, parse

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class JournaledRequest:
    """A train request as it was journaled, with the exact tokens of its choices."""

    step: int
    """The step that it makes."""
    digest: str
    base_model: str
    model: Json
    groups: list[Json]
    config: Json


class Journal:
    """The newest train request of one model, until it is delivered and its checkpoint synced."""

    def __init__(self, directory: Path) -> None:
        self._request = directory / "journal.json"
        self._delivered = directory / "journal.delivered.json"
        self._rows = directory / "journal.rows.jsonl"
        self._step: int | None = None
        self._synced = False

    def begin(self, request: JournaledRequest) -> None:
        """Write the request down, durably; only then may it be trained."""
        temporary = self._request.with_suffix(".tmp")
        try:
            self._request.parent.mkdir(parents=True, exist_ok=True)
            self._rows.unlink(missing_ok=True)
            with temporary.open("w", encoding="utf-8") as file:
                file.writelines(encode_in_pieces(vars(request)))
                file.flush()
                os.fsync(file.fileno())
            self._step, self._synced = request.step, False
            temporary.rename(self._request)
            handle = os.open(self._request.parent, os.O_RDONLY)
            try:
                os.fsync(handle)  # the rename itself
            finally:
                os.close(handle)
        except OSError as exc:
            temporary.unlink(missing_ok=True)
            raise DiskFull(
                f"The request cannot be written to `{self._request}`: {exc.strerror or exc}",
                hint="Free disk space, or keep fewer checkpoints, and send it again",
            ) from exc

    @property
    def is_pending(self) -> bool:
        """Whether there is a request whose answer was not delivered."""
        return self._request.is_file()

    def pending(self) -> JournaledRequest | None:
        """The request whose answer was not delivered, if there is one."""
        return self._read(self._request)

    def unsynced(self) -> JournaledRequest | None:
        """A request whose answer was delivered, but whose checkpoint may be lost."""
        return self._read(self._delivered)

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

    def delivered(self, step: int) -> None:
        """The client has its answer: the same body from now on is a new request.

        Of an older step, whose answer was asked for again, nothing is left here.
        """
        if step != self._step:
            return
        if self._synced:
            self._request.unlink(missing_ok=True)
        elif self._request.is_file():
            self._request.rename(self._delivered)
        self._rows.unlink(missing_ok=True)

    def synced(self) -> None:
        """The checkpoint outlives a power cut: a request that was delivered is needed no longer."""
        self._synced = True
        self._delivered.unlink(missing_ok=True)

    def forget(self) -> None:
        """The request cannot be trained, and is not tried for ever."""
        for path in (self._request, self._delivered, self._rows):
            path.unlink(missing_ok=True)

    def _read(self, path: Path) -> JournaledRequest | None:
        try:
            request = JournaledRequest(**parse(path.read_bytes()))
        except FileNotFoundError:
            return None
        self._step = request.step
        return request


def interrupted(state: Path, base_model: str | None) -> Iterator[JournaledRequest]:
    """The steps of `base_model` that a server left unfinished, or not yet safe on the disk."""
    journals = state.glob(f"{MODEL_GLOB}/journal*.json")
    for directory in sorted({path.parent for path in journals}):
        journal = Journal(directory)
        request = journal.pending() or journal.unsynced()
        if request and request.base_model == base_model:
            logger.info("taking up step %s of %s", request.step, directory.name)
            yield request
