"""The conversations under each rollout's base URL: messages and choices, as the agent saw them.

The ledger stores tokens for training. This stores the conversation, so that a harness can score it
and train on it without any change to the agent's framework. SQLite, in WAL mode.
"""

import contextlib
import sqlite3
import time
from pathlib import Path

from kit import json_text
from kit.types import Json
from trainer.errors import StorageError
from trainer.server.database import Database
from trainer.server.health import Health

_SCHEMA = """
CREATE TABLE IF NOT EXISTS said (
    id INTEGER PRIMARY KEY, rollout TEXT NOT NULL, body TEXT NOT NULL, created REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS said_by_rollout ON said (rollout);
CREATE INDEX IF NOT EXISTS said_by_age ON said (created);
"""
KEPT_SECONDS = 6 * 3600  # rollouts are read at the end of their epoch, not later
_SWEEP_EVERY = 1000


class Rollouts:
    """Completions by rollout, in the order in which they ended."""

    def __init__(self, path: Path, *, health: Health | None = None) -> None:
        self._db = Database(path, _set_up, health=health)
        self._since_sweep = 0
        with contextlib.suppress(StorageError):  # a full disk: later, then
            self._sweep()

    def close(self) -> None:
        self._db.close()

    def record(self, rollout: str, body: Json) -> None:
        self._db.execute(
            "INSERT INTO said VALUES (NULL, ?, ?, ?)",
            (rollout, json_text.dump(body).decode(), time.time()),
        )
        self._since_sweep += 1
        if self._since_sweep >= _SWEEP_EVERY:
            self._sweep()

    def read(self, rollout: str) -> list[str]:
        """Return the completions of a rollout, each as JSON."""
        found = self._db.execute("SELECT body FROM said WHERE rollout = ? ORDER BY id", (rollout,))
        return [body for (body,) in found]

    def _sweep(self) -> None:
        self._since_sweep = 0
        self._db.execute("DELETE FROM said WHERE created < ?", (time.time() - KEPT_SECONDS,))


def _set_up(db: sqlite3.Connection) -> None:
    db.executescript(_SCHEMA)
    db.execute("SELECT id, rollout, body, created FROM said LIMIT 0")  # not another's file
