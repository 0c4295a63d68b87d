from pathlib import Path

from trainer.server.journal import Journal, JournaledRequest

REQUEST = JournaledRequest(3, "abc", "tiny-random", {"name": "m", "project": "p"}, [{"x": 1}], {})


def test_a_request_is_pending_until_it_is_delivered(tmp_path: Path) -> None:
    assert Journal(tmp_path).pending() is None
    Journal(tmp_path).begin(REQUEST)
    assert Journal(tmp_path).pending() == REQUEST
    again = Journal(tmp_path)
    assert again.pending() == REQUEST
    again.delivered(2)  # an older answer that was requested again
    assert Journal(tmp_path).pending() == REQUEST
    again.delivered(3)
    assert Journal(tmp_path).pending() is None


def test_a_delivered_request_is_kept_until_its_checkpoint_is_synced(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.begin(REQUEST)
    journal.delivered(3)
    assert Journal(tmp_path).unsynced() == REQUEST
    journal.synced()
    assert list(tmp_path.iterdir()) == []
    journal.begin(REQUEST)
    journal.synced()
    assert Journal(tmp_path).pending() == REQUEST
    journal.delivered(3)
    assert list(tmp_path.iterdir()) == []


def test_a_request_that_cannot_be_trained_is_forgotten(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.begin(REQUEST)
    journal.row({"loss": 1.0})
    journal.forget()
    assert list(tmp_path.iterdir()) == []


def test_a_new_request_starts_without_the_rows_of_the_last_one(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.begin(REQUEST)
    journal.row({"loss": 1.0})
    journal.row({"loss": 0.5})
    assert journal.rows() == [{"loss": 1.0}, {"loss": 0.5}]
    journal.begin(REQUEST)
    assert journal.rows() == []


def test_a_truncated_row_is_skipped(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.row({"loss": 1.0})
    with (tmp_path / "journal.rows.jsonl").open("a") as file:
        file.write('{"loss": 0.')
    assert journal.rows() == [{"loss": 1.0}]
