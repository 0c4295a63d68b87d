"""The journal makes a step a transaction: the request is on disk before the first gradient.

Each model has one file, for its newest step. After a kill, the next server finds it and trains
the step again, or only delivers the answer if the checkpoint exists. A delivered request is kept
until its checkpoint is synced, so that a power cut loses no step.
"""

import dataclasses
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
    """A train request in the journal, with the exact tokens of its choices."""

    step: int
    """The step that it trains."""
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
        """Write the request durably; only then may it be trained."""
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
                os.fsync(handle)  # makes the rename durable
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
        """Whether a request still waits for its answer to be delivered."""
        return self._request.is_file()

    def pending(self) -> JournaledRequest | None:
        """The request whose answer was not delivered yet, if any."""
        return self._read(self._request)

    def unsynced(self) -> JournaledRequest | None:
        """A delivered request whose checkpoint a power cut could still lose, if any."""
        return self._read(self._delivered)

    def row(self, row: Json) -> None:
        with self._rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def rows(self) -> list[Json]:
        """The rows so far, without a last line that was cut off."""
        if not self._rows.is_file():
            return []
        text = self._rows.read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def restart(self) -> None:
        """Delete the rows of an attempt that made no checkpoint."""
        self._rows.unlink(missing_ok=True)

    def delivered(self, step: int) -> None:
        """Mark the answer as delivered: from now on the same body is a new request.

        An older step, whose answer was requested again, has no entry any more.
        """
        if step != self._step:
            return
        if self._synced:
            self._request.unlink(missing_ok=True)
        elif self._request.is_file():
            self._request.rename(self._delivered)
        self._rows.unlink(missing_ok=True)

    def synced(self) -> None:
        """Mark the checkpoint as safe from a power cut, and drop a delivered request."""
        self._synced = True
        self._delivered.unlink(missing_ok=True)

    def forget(self) -> None:
        """Delete a request that cannot be trained, so that it is not tried again."""
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
    """The requests of `base_model` that a server left unfinished or not yet synced."""
    journals = state.glob(f"{MODEL_GLOB}/journal*.json")
    for directory in sorted({path.parent for path in journals}):
        journal = Journal(directory)
        request = journal.pending() or journal.unsynced()
        if request and request.base_model == base_model:
            logger.info("resuming step %s of %s", request.step, directory.name)
            if (request.model.get("run_name") or request.model["name"]) != directory.name:
                # The run was moved to its new name after this request was written.
                model = {**request.model, "run_name": directory.name}
                request = dataclasses.replace(request, model=model)
            yield request
