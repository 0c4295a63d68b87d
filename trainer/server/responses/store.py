"""Stored responses, which `previous_response_id` and item references continue. SQLite, WAL mode.

Threads of Anthropic's API are kept in the same way, in a file of their own.

The newest ones are kept, up to `KEPT` responses and `KEPT_BYTES` of their conversations, and they
survive a restart of the server.
"""

import contextlib
import json
import sqlite3
from pathlib import Path

from kit.types import Json
from trainer.errors import NotFound, StorageError
from trainer.server.database import Database
from trainer.server.health import Health

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, body TEXT NOT NULL, messages TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS items (id TEXT PRIMARY KEY, response TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS items_by_response ON items (response);
"""
KEPT = 10_000
KEPT_BYTES = 1 << 30
_SWEEP_EVERY = 100


class ResponseStore:
    """Responses by id, each with its whole conversation, so that deleting one breaks no other."""

    def __init__(
        self,
        path: Path,
        *,
        kept: int = KEPT,
        kept_bytes: int = KEPT_BYTES,
        health: Health | None = None,
    ) -> None:
        self._db = Database(path, _set_up, health=health)
        self._kept = kept
        self._kept_bytes = kept_bytes
        self._since_sweep = 0
        with contextlib.suppress(StorageError):  # a full disk: later, then
            self._sweep()

    def close(self) -> None:
        self._db.close()

    def put(self, body: Json, messages: list[Json]) -> None:
        """Store a response, and the conversation that it ends."""
        self._db.execute(
            "INSERT INTO responses VALUES (NULL, ?, ?, ?)",
            (body["id"], json.dumps(body), json.dumps(messages)),
        )
        self._db.executemany(
            "INSERT INTO items VALUES (?, ?)",
            [(item["id"], body["id"]) for item in body["output"]],
        )
        self._since_sweep += 1
        if self._since_sweep >= min(_SWEEP_EVERY, self._kept):
            self._sweep()

    def get(self, response_id: str) -> Json:
        body: Json = json.loads(self._row(response_id)[0])
        return body

    def messages(self, response_id: str) -> list[Json]:
        """The conversation up to a response's answer, without its instructions."""
        found: list[Json] = json.loads(self._row(response_id)[1])
        return found

    def item(self, item_id: str) -> Json:
        """An output item of a stored response."""
        row = self._db.execute("SELECT response FROM items WHERE id = ?", (item_id,)).fetchone()
        if row is None:
            raise NotFound(
                f"There is no stored item `{item_id}`",
                hint="Send the item itself; items of responses with `store: false` are not kept",
            )
        output: list[Json] = self.get(row[0])["output"]
        return next(item for item in output if item["id"] == item_id)

    def delete(self, response_id: str) -> None:
        self._row(response_id)
        self._delete([response_id])

    def _row(self, response_id: str) -> tuple[str, str]:
        found = self._db.execute(
            "SELECT body, messages FROM responses WHERE id = ?", (response_id,)
        ).fetchone()
        if found is None:
            raise NotFound(
                f"There is no stored response `{response_id}`",
                hint=f"Send the whole conversation as `input`; the newest {self._kept} are kept, "
                "except those with `store: false`",
            )
        return found[0], found[1]

    def _sweep(self) -> None:
        """Delete the oldest responses beyond the bounds."""
        self._since_sweep = 0
        size = 0
        old: list[str] = []
        rows = self._db.execute(
            "SELECT id, length(body) + length(messages) FROM responses ORDER BY number DESC"
        )
        for count, (response_id, length) in enumerate(rows, start=1):
            size += length
            if count > self._kept or size > self._kept_bytes:
                old.append(response_id)
        self._delete(old)

    def _delete(self, ids: list[str]) -> None:
        keys = [(response_id,) for response_id in ids]
        self._db.executemany("DELETE FROM items WHERE response = ?", keys)
        self._db.executemany("DELETE FROM responses WHERE id = ?", keys)


def _set_up(db: sqlite3.Connection) -> None:
    db.executescript(_SCHEMA)
    db.execute("SELECT number, id, body, messages FROM responses LIMIT 0")  # not another's file
    db.execute("SELECT id, response FROM items LIMIT 0")
