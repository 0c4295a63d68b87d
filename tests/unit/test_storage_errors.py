"""A fault of the disk becomes one sentence with a status that says what to do."""

import errno
import os
import sqlite3
from pathlib import Path

import pytest

from trainer.errors import DiskFull, StorageError, is_storage_fault, storage_error


@pytest.mark.parametrize(
    ("code", "kind", "status"),
    [
        (errno.ENOSPC, DiskFull, 507),
        (errno.EDQUOT, DiskFull, 507),
        (errno.EROFS, StorageError, 503),
        (errno.EACCES, StorageError, 503),
        (errno.EIO, StorageError, 503),
    ],
)
def test_the_cause_decides_the_status(code: int, kind: type[StorageError], status: int) -> None:
    fault = OSError(code, os.strerror(code))
    assert is_storage_fault(fault)
    error = storage_error(fault, "The request cannot be written to `x`")
    assert (type(error), error.status) == (kind, status)
    assert error.message == f"The request cannot be written to `x`: {os.strerror(code)}"
    assert error.hint


def test_a_database_on_a_full_or_damaged_disk_is_a_fault_of_the_disk(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "x.db", isolation_level=None)
    db.execute("CREATE TABLE t (x)")
    db.execute("PRAGMA max_page_count = 2")
    with pytest.raises(sqlite3.OperationalError) as full:
        db.execute("INSERT INTO t VALUES (zeroblob(100000))")
    db.close()
    assert storage_error(full.value).status == 507
    (tmp_path / "x.db").write_bytes(b"no database at all" * 100)
    broken = sqlite3.connect(tmp_path / "x.db")
    with pytest.raises(sqlite3.DatabaseError) as damaged:
        broken.execute("SELECT * FROM t")
    broken.close()
    assert is_storage_fault(damaged.value)
    assert storage_error(damaged.value).status == 503


def test_a_closed_connection_is_no_fault_of_the_disk() -> None:
    assert not is_storage_fault(ConnectionResetError(errno.ECONNRESET, "reset"))
    assert not is_storage_fault(sqlite3.ProgrammingError("wrong"))
    assert not is_storage_fault(ValueError())
