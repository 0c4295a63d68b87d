"""The journal makes a step a transaction: the request is on disk before the first gradient.

Each step that is under way has a file. After a kill, the next server finds them and trains the
steps again in order, or only delivers an answer if the checkpoint exists. A delivered request is
kept until its checkpoint is synced, so that a power cut loses no step.
"""

import contextlib
import dataclasses
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kit.files import append_lines, make_directories, read_lines, sync
from kit.state_dir import MODEL_GLOB, STEP_NAME, step_name
from kit.types import Json
from trainer.errors import storage_error
from trainer.processes.large_json import encode_in_pieces, parse
from trainer.server.health import Health

logger = logging.getLogger(__name__)
_FILE = re.compile(rf"journal\.({STEP_NAME.pattern})(\.delivered)?\.json")


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
    """The train requests of one model, each until it is delivered and its checkpoint synced."""

    def __init__(self, directory: Path, health: Health | None = None) -> None:
        self._directory = directory
        self._health = health or Health()
        self._awaited: set[int] = set()
        """Steps whose answer was not delivered yet. In memory, because a file that could not be
        deleted must not make an old answer the answer to a new request."""
        self._synced: set[int] = set()
        self._left: set[int] = set()
        """Delivered steps whose files could not be renamed or deleted."""

    def path(self, step: int, kind: str = "json") -> Path:
        """The file of a step: its request, `delivered.json` or `rows.jsonl`."""
        return self._directory / f"journal.{step_name(step)}.{kind}"

    def file(self, step: int) -> Path:
        """The file that holds a step's request now: it has another name once it is delivered."""
        path = self.path(step)
        return path if path.exists() else self.path(step, "delivered.json")

    def begin(self, request: JournaledRequest) -> None:
        """Write the request durably; only then may it be trained."""
        for step in sorted(self._left):
            self.delivered(step)  # the disk may be writable again
        path, temporary = self.path(request.step), self.path(request.step, "tmp")
        written = [temporary]
        try:
            make_directories(self._directory)
            with temporary.open("w", encoding="utf-8") as file:
                file.writelines(encode_in_pieces(vars(request)))
                file.flush()
                os.fsync(file.fileno())
            self.path(request.step, "rows.jsonl").unlink(missing_ok=True)
            self._awaited.discard(request.step)
            self._synced.discard(request.step)
            temporary.rename(path)
            written = [path]
            sync(self._directory)  # makes the rename durable
        except OSError as exc:
            # The client is told that nothing is trained, so a restart must not find it either.
            for left in written:
                with contextlib.suppress(OSError):
                    left.unlink(missing_ok=True)
            raise storage_error(exc, f"The request cannot be written to `{path}`") from exc
        self._awaited.add(request.step)

    def awaits(self, step: int) -> bool:
        """Whether the answer of `step` was not delivered yet."""
        return step in self._awaited

    def pending(self) -> list[JournaledRequest]:
        """The requests whose answers were not delivered yet, in order."""
        found = self._read("")
        self._awaited = {request.step for request in found}
        return found

    def unsynced(self) -> list[JournaledRequest]:
        """Delivered requests whose checkpoints a power cut could still lose, in order."""
        return self._read(".delivered")

    def row(self, step: int, row: Json) -> None:
        """Keep a row for a client that asks again after a kill; the step needs no row."""
        path = self.path(step, "rows.jsonl")
        try:
            append_lines(path, [row])
        except OSError as error:
            logger.warning("a row is not in `%s`: %s", path, error.strerror)

    def rows(self, step: int) -> list[Json]:
        """The rows so far, without a line that was cut off."""
        path = self.path(step, "rows.jsonl")
        found = read_lines(path)
        if found.skipped:
            logger.warning("`%s` lacks %s rows, which are damaged", path, len(found.skipped))
        return found.rows

    def restart(self, step: int) -> None:
        """Delete the rows of an attempt that made no checkpoint."""
        self._delete(step, "rows.jsonl")

    def delivered(self, step: int) -> None:
        """Mark the answer as delivered: from now on the same body is a new request.

        The client has its answer by now, so a disk that refuses is only logged: the next server
        offers it once more.
        """
        self._awaited.discard(step)
        self._left.discard(step)
        path = self.path(step)
        try:
            if step in self._synced:
                path.unlink(missing_ok=True)
            elif path.is_file():
                path.rename(self.path(step, "delivered.json"))
            self.path(step, "rows.jsonl").unlink(missing_ok=True)
        except OSError as error:
            self._left.add(step)
            logger.warning("`%s` stays although it is delivered: %s", path, error.strerror)

    def synced(self, step: int) -> None:
        """Mark the checkpoint as safe from a power cut, and drop a delivered request."""
        self._synced.add(step)
        self._delete(step, "delivered.json")

    def forget(self, step: int) -> None:
        """Delete a request that cannot be trained, so that it is not tried again."""
        self._awaited.discard(step)
        self._delete(step, "json", "delivered.json", "rows.jsonl")

    def _delete(self, step: int, *kinds: str) -> None:
        for path in (self.path(step, kind) for kind in kinds):
            try:
                path.unlink(missing_ok=True)
            except OSError as exc:
                raise storage_error(exc, f"`{path}` cannot be deleted") from exc

    def _read(self, kind: str) -> list[JournaledRequest]:
        found: dict[int, JournaledRequest] = {}
        for path in sorted(self._directory.glob("journal.*.json")):
            name = _FILE.fullmatch(path.name)
            if not name or (name[2] or "") != kind:
                continue
            try:
                found[int(name[1])] = _parsed(path.read_bytes(), int(name[1]))
            except FileNotFoundError:
                continue
            except (OSError, ValueError, TypeError, RecursionError) as error:
                lost = "if a step was under way, send its request again"
                self._health.set_aside(path, error, lost)
        return [found[step] for step in sorted(found)]


def _parsed(data: bytes, step: int) -> JournaledRequest:
    request = JournaledRequest(**parse(data))
    kinds = {"step": int, "model": dict, "groups": list, "config": dict}
    for name, kind in kinds.items():
        if not isinstance(getattr(request, name), kind):
            raise ValueError(f"its `{name}` is not of type {kind.__name__}")
    if request.step != step:
        raise ValueError(f"it holds the request of step `{request.step}`")
    return request


def interrupted(
    state: Path, base_model: str | None, health: Health | None = None
) -> Iterator[JournaledRequest]:
    """For each run of `base_model` with unfinished or unsynced requests, the newest of them."""
    for directory in sorted({path.parent for path in state.glob(f"{MODEL_GLOB}/journal.*.json")}):
        journal = Journal(directory, health)
        requests = [*journal.pending(), *journal.unsynced()]
        request = max(requests, key=lambda request: request.step, default=None)
        if request and request.base_model == base_model:
            steps = ", ".join(str(step) for step in sorted(it.step for it in requests))
            logger.info("resuming steps %s of %s", steps, directory.name)
            if (request.model.get("run_name") or request.model.get("name")) != directory.name:
                # The run was moved to its new name after this request was written.
                model = {**request.model, "run_name": directory.name}
                request = dataclasses.replace(request, model=model)
            yield request
