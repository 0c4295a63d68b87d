import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from trainer.server.health import Health
from trainer.server.journal import Journal, JournaledRequest, interrupted

REQUEST = JournaledRequest(3, "abc", "tiny-random", {"name": "m", "project": "p"}, [{"x": 1}], {})

OTHER_STEP = json.dumps(asdict(REQUEST) | {"step": 4}).encode()


def test_a_request_is_pending_until_it_is_delivered(tmp_path: Path) -> None:
    assert Journal(tmp_path).pending() == []
    Journal(tmp_path).begin(REQUEST)
    assert Journal(tmp_path).pending() == [REQUEST]
    again = Journal(tmp_path)
    assert again.pending() == [REQUEST]
    again.delivered(2)  # an older answer that was requested again
    assert Journal(tmp_path).pending() == [REQUEST]
    again.delivered(3)
    assert Journal(tmp_path).pending() == []


def test_a_delivered_request_is_kept_until_its_checkpoint_is_synced(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.begin(REQUEST)
    journal.delivered(3)
    assert Journal(tmp_path).unsynced() == [REQUEST]
    journal.synced(3)
    assert list(tmp_path.iterdir()) == []
    journal.begin(REQUEST)
    journal.synced(3)
    assert Journal(tmp_path).pending() == [REQUEST]
    journal.delivered(3)
    assert list(tmp_path.iterdir()) == []


def test_a_request_that_cannot_be_trained_is_forgotten(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.begin(REQUEST)
    journal.row(3, {"loss": 1.0})
    journal.forget(3)
    assert list(tmp_path.iterdir()) == []


def test_a_new_request_starts_without_the_rows_of_the_last_one(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.begin(REQUEST)
    journal.row(3, {"loss": 1.0})
    journal.row(3, {"loss": 0.5})
    assert journal.rows(3) == [{"loss": 1.0}, {"loss": 0.5}]
    journal.begin(REQUEST)
    assert journal.rows(3) == []


def test_a_truncated_row_is_skipped(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.row(3, {"loss": 1.0})
    with (tmp_path / "journal.0003.rows.jsonl").open("a") as file:
        file.write('{"loss": 0.')
    assert journal.rows(3) == [{"loss": 1.0}]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\0" * 64,
        b"null",
        b"[]",
        b'{"step": 1}',
        OTHER_STEP,
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
@pytest.mark.parametrize("name", ["journal.0003.json", "journal.0003.delivered.json"])
def test_a_damaged_journal_is_set_aside_and_named(
    tmp_path: Path, content: bytes, name: str
) -> None:
    model, health = tmp_path / "p" / "models" / "m", Health()
    model.mkdir(parents=True)
    (model / name).write_bytes(content)
    assert list(interrupted(tmp_path, "tiny-random", health)) == []
    [aside] = model.iterdir()
    assert aside.name.startswith(f"{name}.damaged-") and aside.read_bytes() == content
    assert health.report()["status"] == "degraded"
    Journal(model).begin(REQUEST)
    assert [found.step for found in interrupted(tmp_path, "tiny-random", health)] == [3]


def test_the_request_of_another_step_does_not_await_its_answer(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.begin(REQUEST)
    assert journal.awaits(3) and not journal.awaits(2)
    journal.delivered(3)
    assert not journal.awaits(3)


def test_several_requests_are_kept_in_order_and_apart(tmp_path: Path) -> None:
    journal, steps = Journal(tmp_path), (9, 10, 11)
    for step in steps:
        journal.begin(replace(REQUEST, step=step))
        journal.row(step, {"loss": float(step)})
    journal.delivered(10)
    assert [journal.awaits(step) for step in steps] == [True, False, True]
    again = Journal(tmp_path)
    assert [request.step for request in again.pending()] == [9, 11]
    assert [request.step for request in again.unsynced()] == [10]
    assert again.rows(11) == [{"loss": 11.0}] and again.rows(10) == []
    journal.forget(9)
    journal.synced(10)
    assert [request.step for request in again.pending() + again.unsynced()] == [11]
