"""The conversations of rollouts, and how old ones are deleted."""

import sqlite3
import time
from pathlib import Path

from trainer.server.rollouts import KEPT_SECONDS, Rollouts

# The table of servers that had no index of the ages.
OLD_SCHEMA = """
CREATE TABLE said (
    id INTEGER PRIMARY KEY, rollout TEXT NOT NULL, body TEXT NOT NULL, created REAL NOT NULL
);
CREATE INDEX said_by_rollout ON said (rollout);
"""


def test_old_conversations_are_found_by_their_age_also_in_an_older_file(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.db"
    with sqlite3.connect(path) as db:
        db.executescript(OLD_SCHEMA)
        old = time.time() - KEPT_SECONDS - 60
        ages = [("old", old), ("new", time.time())]
        db.executemany("INSERT INTO said VALUES (NULL, ?, '{}', ?)", ages)
    db.close()
    rollouts = Rollouts(path)
    assert (rollouts.read("old"), rollouts.read("new")) == ([], ["{}"])
    rollouts.close()
    with sqlite3.connect(path) as db:
        plan = db.execute("EXPLAIN QUERY PLAN DELETE FROM said WHERE created < 3").fetchall()
    db.close()
    assert "said_by_age" in str(plan)
