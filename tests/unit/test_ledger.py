import math
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from trainer.config import ServerConfig
from trainer.engines.engine import Delta, SampleRequest
from trainer.errors import TrainerError
from trainer.server.backend import Backend
from trainer.server.ledger import KEPT_SECONDS, RECENT_SECONDS, Entry, Ledger, entry_of

# The table of servers whose choices had no ids.
OLD_SCHEMA = """
CREATE TABLE completions (
    id INTEGER PRIMARY KEY, fingerprint BLOB NOT NULL, content BLOB NOT NULL, model TEXT NOT NULL,
    step INTEGER NOT NULL, lora_sha256 TEXT NOT NULL, rollout TEXT, prompt_ids BLOB NOT NULL,
    completion_ids BLOB NOT NULL, logprobs BLOB NOT NULL, created REAL NOT NULL
);
CREATE INDEX by_fingerprint ON completions (fingerprint);
CREATE INDEX by_content ON completions (content);
"""
OLD_COLUMNS = (
    "id, fingerprint, content, model, step, lora_sha256, rollout, prompt_ids, completion_ids, "
    "logprobs, created"
)


def entry(prompt: list[int], ids: list[int], logprobs: list[float], **more: Any) -> Entry:
    fields = {"model": "p/m", "step": 0, "lora_sha256": "", "rollout": None, **more}
    return Entry(prompt_ids=prompt, completion_ids=ids, logprobs=logprobs, **fields)


def test_entries_and_their_rollouts_survive_a_restart(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    entries = [entry([1], [token], [-0.5], rollout=f"r{token}") for token in (5, 6)]
    for one in entries:
        ledger.record(one, "")
    ledger.close()
    again = Ledger(tmp_path / "ledger.db")
    rows = [again.with_id(one.id) for one in entries]
    assert [entry_of(row) for row in rows if row] == entries


def test_entries_of_old_steps_are_deleted(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    entries = [entry([1], [step], [-0.5], step=step) for step in (0, 1, 2)]
    for one in entries:
        ledger.record(one, "")
    ledger.forget("p/m", before=2)
    assert [bool(ledger.with_id(one.id)) for one in entries] == [False, False, True]


def test_the_tools_of_a_prompt_are_kept_once_and_only_while_an_entry_needs_them(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ledger.db"
    ledger = Ledger(path)
    template = {"tools": [{"name": "look"}], "enable_thinking": False}
    entries = [entry([1], [2], [-0.5], template=template) for _ in range(2)]
    for one in entries:
        ledger.record(one, "")
    rows = [ledger.with_id(one.id) for one in entries]
    assert [ledger.variables(row) for row in rows if row] == [template] * 2

    assert templates(path) == 1
    ledger.record(entry([1], [2], [-0.5], step=9, template=template), "")
    ledger.forget("p/m", before=9)
    assert templates(path) == 1
    ledger.forget("p/m", before=10)
    assert templates(path) == 0
    ledger.close()
    with sqlite3.connect(path) as db:
        db.execute("INSERT INTO templates VALUES (x'00', '{}')")  # as a kill may leave it
    db.close()
    Ledger(path).close()
    assert templates(path) == 0


def test_the_tools_of_entries_that_age_deletes_are_deleted_with_them(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    ledger = Ledger(path)
    for number in range(99):
        ledger.record(entry([1], [2], [-0.5], model="", template={"number": number}), "")
    set_age(path, KEPT_SECONDS + 60, "id <= 90")
    ledger.record(entry([1], [2], [-0.5], model="", template={"number": 0}), "")
    assert templates(path) == 10  # the newest entry shares its tools with the oldest
    ledger.close()


def test_a_ledger_of_an_older_server_is_read_and_extended_in_place(tmp_path: Path) -> None:
    path, other = tmp_path / "ledger.db", tmp_path / "other.db"
    new = Ledger(other)
    old = entry([1, 2], [7], [-0.5])
    new.record(old, "old")
    new.close()
    with sqlite3.connect(path) as db:
        db.executescript(OLD_SCHEMA)
        db.execute("ATTACH ? AS other", (str(other),))
        db.execute(f"INSERT INTO completions SELECT {OLD_COLUMNS} FROM other.completions")
    db.close()
    for _ in range(2):  # the second start finds the new columns
        ledger = Ledger(path)
        row = ledger.with_content("old")[0]
        found = entry_of(row)
        assert (found.id, found.prompt_ids, found.constrained) == ("", [1, 2], False)
        assert ledger.variables(row) is None
        added = entry([3], [8], [-0.5], constrained=True)
        ledger.record(added, "new")
        again = ledger.with_id(added.id)
        assert again and entry_of(again) == added
        ledger.close()


def templates(path: Path) -> int:
    with sqlite3.connect(path) as db:
        (count,) = db.execute("SELECT count(*) FROM templates").fetchone()
    db.close()
    return int(count)


def set_age(path: Path, seconds: float, where: str = "1") -> None:
    with sqlite3.connect(path) as db:
        db.execute(f"UPDATE completions SET created = ? WHERE {where}", (time.time() - seconds,))
    db.close()


def record(ledger: Ledger, count: int) -> list[Entry]:
    """Record entries of the base model, which no step ever deletes."""
    entries = [entry([1] * 500, [2], [-0.5], model="") for _ in range(count)]
    for one in entries:
        ledger.record(one, "")
    return entries


def test_entries_of_a_model_that_never_trains_are_deleted_by_age(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    ledger = Ledger(path)
    old = record(ledger, 99)
    set_age(path, KEPT_SECONDS + 60)
    set_age(path, KEPT_SECONDS - 60, "id = 99")
    (new,) = record(ledger, 1)
    assert [bool(ledger.with_id(one.id)) for one in old] == [False] * 98 + [True]
    assert ledger.with_id(new.id)


@pytest.mark.parametrize("set_back", [False, True])
def test_above_its_size_the_ledger_deletes_the_oldest_but_none_of_an_open_rollout(
    tmp_path: Path, set_back: bool
) -> None:
    path = tmp_path / "ledger.db"
    ledger = Ledger(path, max_bytes=1_000_000)  # some 350 entries
    entries = record(ledger, 1000)
    assert all(ledger.with_id(one.id) for one in entries)  # all are recent
    set_age(path, (RECENT_SECONDS + 60) * (-1 if set_back else 1), "id <= 900")
    recent = record(ledger, 600)
    kept = [bool(ledger.with_id(one.id)) for one in entries]
    assert kept == [False] * 900 + [True] * 100
    assert all(ledger.with_id(one.id) for one in recent)
    set_age(path, RECENT_SECONDS + 60)
    record(ledger, 300)
    set_age(path, RECENT_SECONDS + 60)
    record(ledger, 300)
    with sqlite3.connect(path) as db:
        (left,) = db.execute("SELECT count(*) FROM completions").fetchone()
        plan = "EXPLAIN QUERY PLAN DELETE FROM completions WHERE model = '' AND step < 3"
        assert "by_model" in str(db.execute(plan).fetchall())
    db.close()
    assert 300 <= left < 700


def test_a_logprob_that_is_no_number_is_refused_and_not_recorded(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    broken = entry([1], [2, 3], [-0.5, math.nan])
    with pytest.raises(TrainerError, match="not a number"):
        ledger.record(broken, "")
    assert ledger.with_id(broken.id) is None


async def test_a_prompts_logprob_that_is_no_number_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Backend(ServerConfig(state_dir=str(tmp_path)), openai_port=0)

    async def sample(*_: Any) -> AsyncIterator[Delta]:
        yield Delta(0, finish_reason="length", prompt_logprobs=[None, -1.0, logprob])

    monkeypatch.setattr(backend.models, "find", lambda name: (None, 0))
    monkeypatch.setattr(backend.workers, "sample", sample)
    for logprob in (-2.0, math.nan):
        deltas = backend.sample("base", SampleRequest([1, 2, 3], prompt_logprobs=True))
        with pytest.raises(TrainerError) if math.isnan(logprob) else nullcontext():
            assert [step async for step, _ in deltas] == [0]
