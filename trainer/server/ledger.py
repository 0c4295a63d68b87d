"""The ledger records every sampled token and the weights that sampled it. SQLite, in WAL mode.

A train request's choices are matched to their entries (`trainer/server/matching.py`). Training then
uses the sampled tokens, even if a framework rebuilt the choice from its content and logprobs.

Entries of models that train are deleted some steps later. Entries of models that are only sampled
would pile up, so `record` also deletes by age and size, a few at a time.
"""

import json
import sqlite3
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kit.types import Json
from trainer.errors import TrainerError
from trainer.exact_tokens import IMPOSSIBLE, PREFIX, new_choice_id
from trainer.server import rollouts
from trainer.server.database import Database
from trainer.server.digests import TextDigest, digest, fingerprint, text_digest
from trainer.server.health import Health

KEPT_SECONDS = 7 * 24 * 3600
"""The age at which any entry is deleted."""
MAX_BYTES = 8 * 2**30
"""The size above which the oldest entries are deleted, except those of open rollouts."""
RECENT_SECONDS = rollouts.KEPT_SECONDS
"""Entries younger than this always stay: the rollout or trajectory that needs them may be open."""
_PRUNE_EVERY = 100
_PRUNED_AT_ONCE = 200  # more than are added in between, so that the ledger shrinks

_SCHEMA = """
CREATE TABLE IF NOT EXISTS completions (
    id INTEGER PRIMARY KEY,
    fingerprint BLOB NOT NULL,
    content BLOB NOT NULL,
    model TEXT NOT NULL,
    step INTEGER NOT NULL,
    lora_sha256 TEXT NOT NULL,
    rollout TEXT,
    prompt_ids BLOB NOT NULL,
    completion_ids BLOB NOT NULL,
    logprobs BLOB NOT NULL,
    created REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS templates (digest BLOB PRIMARY KEY, variables TEXT NOT NULL);
"""
# Columns that ledgers of older servers lack.
_ADDED = {
    "choice_id": "TEXT",
    "constrained": "INTEGER NOT NULL DEFAULT 0",
    "template": "BLOB",  # a digest in `templates`: many entries share their tools
    "prompt_text": "BLOB",  # a digest under the tokenizer's
    "conversation": "BLOB",  # the same of prompt and choice
}
_INDEXES = """
CREATE INDEX IF NOT EXISTS by_fingerprint ON completions (fingerprint);
CREATE INDEX IF NOT EXISTS by_content ON completions (content);
CREATE UNIQUE INDEX IF NOT EXISTS by_choice_id ON completions (choice_id);
CREATE INDEX IF NOT EXISTS by_model ON completions (model, step);
CREATE INDEX IF NOT EXISTS by_template ON completions (template);
CREATE INDEX IF NOT EXISTS by_conversation ON completions (conversation);
CREATE INDEX IF NOT EXISTS by_rollout ON completions (conversation, rollout);
"""
_UNUSED = "NOT EXISTS (SELECT 1 FROM completions WHERE template = digest)"


@dataclass(frozen=True)
class Entry:
    """One sampled choice."""

    model: str
    """`PROJECT/NAME`, or empty for the base model."""
    step: int
    lora_sha256: str
    rollout: str | None
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    """The policy's own logprobs, which train, also of a choice that a constraint shaped."""
    id: str = field(default_factory=new_choice_id)
    """Unguessable; every answer carries it in the field `choice_id` of the choice."""
    constrained: bool = False
    """Whether the request limited the text, e.g. to a JSON schema."""
    template: Json = field(default_factory=dict)
    """The tools and variables with which the chat template rendered the prompt."""
    prompt_text: str = ""
    """The prompt as the chat template rendered it; empty for plain completions."""
    tokenizer: str = ""
    """The digest of the tokenizer, because a state directory may outlive its base model."""


class Row(NamedTuple):
    """An entry as the database holds it: arrays of numbers are bytes, texts are digests."""

    id: str | None
    constrained: int
    model: str
    step: int
    lora_sha256: str
    rollout: str | None
    fingerprint: bytes
    content: bytes
    template: bytes | None
    prompt_text: bytes | None
    conversation: bytes | None
    prompt_ids: bytes
    completion_ids: bytes
    logprobs: bytes


_COLUMNS = ", ".join(("choice_id", *Row._fields[1:]))


class Ledger:
    """Stores entries and finds them again. Only the server's event loop records."""

    def __init__(
        self, path: Path, *, max_bytes: int = MAX_BYTES, health: Health | None = None
    ) -> None:
        self._max_bytes = max_bytes
        self._since_pruned = 0
        # If a power cut loses an entry, its choice is tokenized again: no need for a sync.
        self._db = Database(path, _set_up, health=health)

    def close(self) -> None:
        self._db.close()

    def record(self, entry: Entry, content: str) -> None:
        """Store a choice whose text is `content`."""
        names = "".join([f"{PREFIX}{id}" for id in entry.completion_ids])
        # A constraint may leave only tokens that the policy rules out. Answers hold this number
        # too, because JSON has no infinity, and the learner refuses one.
        logprobs = np.maximum(np.array(entry.logprobs, dtype=np.float64), IMPOSSIBLE)
        refuse_nan(logprobs)
        variables = json.dumps(entry.template)
        text = TextDigest(entry.tokenizer)
        prompt_text, conversation = text.add(entry.prompt_text), text.add(content)
        row = Row(
            id=entry.id,
            constrained=int(entry.constrained),
            model=entry.model,
            step=entry.step,
            lora_sha256=entry.lora_sha256,
            rollout=entry.rollout,
            fingerprint=fingerprint(names, logprobs),
            content=text_digest(content),
            template=digest(variables.encode()),
            prompt_text=prompt_text if entry.prompt_text else None,
            conversation=conversation if entry.prompt_text else None,
            prompt_ids=array("i", entry.prompt_ids).tobytes(),
            completion_ids=array("i", entry.completion_ids).tobytes(),
            logprobs=logprobs.tobytes(),
        )
        values = (*row, time.time())
        self._db.execute(
            f"INSERT INTO completions ({_COLUMNS}, created) VALUES ({_marks(values)})", values
        )
        # After its entry: `forget` runs in another thread and deletes templates without entries.
        self._db.execute("INSERT OR IGNORE INTO templates VALUES (?, ?)", (row.template, variables))
        self._since_pruned += 1
        if self._since_pruned >= _PRUNE_EVERY:
            self._prune()

    def with_id(self, id: str) -> Row | None:
        """The entry with that id, or None."""
        return next(iter(self._rows("choice_id", id)), None)

    def with_fingerprint(self, identity: bytes) -> list[Row]:
        """The entries with those tokens and rounded logprobs, oldest first."""
        return self._rows("fingerprint", identity)

    def with_content(self, content: str) -> list[Row]:
        """The entries with that text, oldest first."""
        return self._rows("content", text_digest(content))

    def newest_of(self, conversation: bytes, rollout: str | None) -> Row | None:
        """The newest entry whose prompt and text have this digest, of `rollout` if it has one."""
        query = f"SELECT {_COLUMNS} FROM completions WHERE conversation = ?"
        # Two queries, because one that sorts reads every entry of a common answer.
        for condition, values in (("AND rollout IS ?", [rollout]), ("", [])):
            order = f"{condition} ORDER BY id DESC LIMIT 1"
            if found := self._db.execute(f"{query} {order}", [conversation, *values]):
                return Row(*found[0])
        return None

    def variables(self, row: Row) -> Json | None:
        """The tools and variables that rendered a row's prompt; None if they are not known."""
        if row.template is None:
            return None
        query = "SELECT variables FROM templates WHERE digest = ?"
        found = self._db.execute(query, (row.template,)).fetchone()
        variables: Json | None = json.loads(found[0]) if found else None
        return variables

    def forget(self, model: str, *, before: int) -> None:
        """Delete a model's entries of steps below `before`, which are too old to train on."""
        while self._delete("model = ? AND step < ?", model, before):
            pass  # in small parts, between which the event loop can record

    def _prune(self) -> None:
        """Delete the oldest entries if they are too old, or if the ledger is too large."""
        self._since_pruned = 0
        # An entry from the future was recorded before the clock was set back: it is old as well.
        age = f"abs({time.time()} - created)"
        limit = RECENT_SECONDS if self._used_bytes() > self._max_bytes else KEPT_SECONDS
        oldest = f"SELECT id, created FROM completions ORDER BY id LIMIT {_PRUNED_AT_ONCE}"
        self._delete(f"id IN (SELECT id FROM ({oldest}) WHERE {age} >= ?)", limit)

    def _delete(self, condition: str, *values: object) -> int:
        """Delete a few of the entries that meet a condition, and return how many."""
        query = f"SELECT id, template FROM completions WHERE {condition} LIMIT {_PRUNED_AT_ONCE}"
        found = self._db.execute(query, values)
        ids, templates = [row[0] for row in found], list({row[1] for row in found})
        self._db.execute(f"DELETE FROM completions WHERE id IN ({_marks(ids)})", ids)
        self._db.execute(
            f"DELETE FROM templates WHERE digest IN ({_marks(templates)}) AND {_UNUSED}", templates
        )
        return len(found)

    def _used_bytes(self) -> int:
        pages, free, size = (
            int(self._db.execute(f"PRAGMA {name}")[0][0])
            for name in ("page_count", "freelist_count", "page_size")
        )
        return (pages - free) * size

    def _rows(self, column: str, value: object) -> list[Row]:
        query = f"SELECT {_COLUMNS} FROM completions WHERE {column} = ? ORDER BY id"
        return [Row(*found) for found in self._db.execute(query, (value,))]


def _set_up(db: sqlite3.Connection) -> None:
    db.executescript(_SCHEMA)
    present = {column[1] for column in db.execute("PRAGMA table_info(completions)")}
    for name, kind in _ADDED.items():
        if name not in present:
            db.execute(f"ALTER TABLE completions ADD COLUMN {name} {kind}")
    db.executescript(_INDEXES)
    db.execute(f"DELETE FROM templates WHERE {_UNUSED}")  # a kill may have left some
    db.execute(f"SELECT {_COLUMNS}, created FROM completions LIMIT 0")  # not another's file


def entry_of(row: Row) -> Entry:
    """A row with its numbers as lists; its template stays in the ledger."""
    return Entry(
        model=row.model,
        step=row.step,
        lora_sha256=row.lora_sha256,
        rollout=row.rollout,
        prompt_ids=array("i", row.prompt_ids).tolist(),
        completion_ids=array("i", row.completion_ids).tolist(),
        logprobs=array("d", row.logprobs).tolist(),
        id=row.id or "",
        constrained=bool(row.constrained),
    )


def refuse_nan(logprobs: NDArray[np.float64]) -> None:
    if np.isnan(logprobs).any():
        raise TrainerError(
            "The engine returned a logprob that is not a number",
            hint="The weights may be damaged: go back to an earlier step, or train more slowly",
        )


def _marks(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))
