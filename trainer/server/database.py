"""A SQLite file in WAL mode that never keeps the server from running.

One that SQLite calls damaged is set aside, and a new one takes its place. Where none can be
written, because the disk is full or read-only, the server works in memory until it is restarted.
"""

import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from trainer.errors import is_storage_fault, storage_error
from trainer.server.health import Health

_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
COMPANIONS = ("-wal", "-shm")


class Rows(list[tuple[Any, ...]]):
    """All rows of a query. They are fetched at once, so that damage shows inside `execute`."""

    def __init__(self, cursor: sqlite3.Cursor) -> None:
        super().__init__(cursor.fetchall())
        self.rowcount = cursor.rowcount

    def fetchone(self) -> tuple[Any, ...] | None:
        return self[0] if self else None


class Database:
    """A connection that several threads may use. `setup` makes the tables of a new file."""

    def __init__(
        self,
        path: Path,
        setup: Callable[[sqlite3.Connection], None],
        *,
        health: Health | None = None,
    ) -> None:
        self._path = path
        self._setup = setup
        self._health = health or Health()
        self._lock = threading.RLock()
        self._db = self._open()

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def execute(self, sql: str, values: Sequence[object] = ()) -> Rows:
        return self._run(lambda db: Rows(db.execute(sql, values)))

    def executemany(self, sql: str, values: Iterable[Sequence[object]]) -> None:
        rows = list(values)
        self._run(lambda db: Rows(db.executemany(sql, rows)))

    def _run(self, action: Callable[[sqlite3.Connection], Rows]) -> Rows:
        with self._lock:
            try:
                try:
                    return action(self._db)
                except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
                    if not _is_damaged(error):
                        raise
                    self._replace(error)
                    return action(self._db)
            except sqlite3.Error as error:
                if not is_storage_fault(error):
                    raise
                raise storage_error(error, f"`{self._path}` cannot be used") from error

    def _open(self) -> sqlite3.Connection:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            return self._connect(str(self._path))
        except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
            if is_storage_fault(error) and not _is_damaged(error):
                return self._in_memory(error)
            self._set_aside(error)  # damaged, or the file of another program
        try:
            return self._connect(str(self._path))
        except (sqlite3.Error, OSError) as error:
            return self._in_memory(error)

    def _connect(self, name: str) -> sqlite3.Connection:
        db = sqlite3.connect(name, isolation_level=None, check_same_thread=False)
        try:
            db.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;")
            self._setup(db)
        except BaseException:
            db.close()
            raise
        return db

    def _in_memory(self, cause: Exception) -> sqlite3.Connection:
        self._health.degrade(
            str(self._path),
            f"`{self._path}` cannot be opened ({cause}): until the server is restarted, what "
            "belongs there is kept in memory",
        )
        return self._connect(":memory:")

    def _replace(self, error: Exception) -> None:
        self._db.close()
        self._set_aside(error)
        self._db = self._open()

    def _set_aside(self, error: Exception) -> None:
        lost = "a new one is begun without its entries"
        self._health.set_aside(self._path, error, lost, companions=COMPANIONS)


def _is_damaged(error: Exception) -> bool:
    # Python cannot decode damaged text, whether in a row or in SQLite's own message about it.
    if isinstance(error, UnicodeDecodeError) or "Could not decode to UTF-8" in str(error):
        return True
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED
