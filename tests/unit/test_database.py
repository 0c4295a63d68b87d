"""A damaged database is set aside; without a disk the server works in memory."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from trainer.server.database import Database
from trainer.server.health import Health
from trainer.server.ledger import Ledger
from trainer.server.responses.store import ResponseStore
from trainer.server.rollouts import Rollouts

STORES: list[Any] = [Ledger, Rollouts, ResponseStore]


def other_tables(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE completions (x)")
    db.execute("CREATE TABLE said (x)")
    db.execute("CREATE TABLE responses (x)")
    db.close()


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("damage", ["garbage", "cut", "text", "other"])
def test_a_damaged_database_is_set_aside_and_a_new_one_begun(
    tmp_path: Path, store: Any, damage: str
) -> None:
    path, health = tmp_path / "x.db", Health()
    if damage == "other":
        other_tables(path)
    else:
        store(path).close()
        data = path.read_bytes()
        text = data.replace(b"CREATE TABLE", b"CREATE \x9cABLE")  # which SQLite's error quotes
        damaged = {"garbage": b"no database" * 500, "cut": data[:5000], "text": text}
        path.write_bytes(damaged[damage])
    store(path, health=health).close()
    assert len(list(tmp_path.glob("x.db.damaged-*"))) == 1
    assert "x.db.damaged-" in health.report()["reasons"][0]
    store(path, health=(again := Health())).close()
    assert again.report() == {"status": "ok"}


@pytest.mark.parametrize("store", STORES)
def test_a_database_that_cannot_be_opened_is_kept_in_memory(tmp_path: Path, store: Any) -> None:
    (tmp_path / "file").write_text("in the way")
    health = Health()
    store(tmp_path / "file" / "x.db", health=health).close()
    assert "kept in memory" in health.report()["reasons"][0]


def test_damage_that_shows_while_serving_is_repaired_at_once(tmp_path: Path) -> None:
    path, health = tmp_path / "rollouts.db", Health()
    rollouts = Rollouts(path)
    for number in range(500):
        rollouts.record("r", {"number": number, "text": "x" * 500})
    rollouts.close()
    data = bytearray(path.read_bytes())
    data[8192 : len(data) - 4096] = b"\xa5" * (len(data) - 12288)
    path.write_bytes(data)
    rollouts = Rollouts(path, health=health)
    rollouts.read("r")
    rollouts.record("r", {"number": 1})
    assert json.loads(rollouts.read("r")[-1]) == {"number": 1}
    assert "is damaged" in health.report()["reasons"][0]
    rollouts.close()


def test_text_that_cannot_be_decoded_is_damage(tmp_path: Path) -> None:
    health = Health()
    path = tmp_path / "x.db"
    database = Database(
        path, lambda db: db.execute("CREATE TABLE IF NOT EXISTS said (x TEXT)"), health=health
    )
    database.execute("INSERT INTO said VALUES (CAST(x'9c' AS TEXT))")
    assert database.execute("SELECT x FROM said") == []
    assert "x.db.damaged-" in health.report()["reasons"][0]
    database.close()


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    def setup(db: sqlite3.Connection) -> None:
        db.execute("CREATE TABLE t (x)")
        db.execute("PRAGMA max_page_count = 3")

    database = Database(tmp_path / "x.db", setup)
    with pytest.raises(Exception, match=r"`.*x.db` cannot be used: database or disk is full") as it:
        database.execute("INSERT INTO t VALUES (zeroblob(100000))")
    assert it.value.status == 507  # type: ignore[attr-defined]
    database.close()
