import sqlite3
from pathlib import Path
from typing import Any

import pytest

from trainer.server.ledger import Entry, Ledger, choices_of

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


def choice(ids: list[int], logprobs: list[float], content: str = "text") -> dict[str, Any]:
    entries = [
        {"token": f"token_id:{token}", "logprob": logprob}
        for token, logprob in zip(ids, logprobs, strict=True)
    ]
    return {
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": content},
        "logprobs": {"content": entries},
    }


def entry(prompt: list[int], ids: list[int], logprobs: list[float], **more: Any) -> Entry:
    fields = {"model": "p/m", "step": 0, "lora_sha256": "", "rollout": None, **more}
    return Entry(prompt_ids=prompt, completion_ids=ids, logprobs=logprobs, **fields)


def test_a_choice_finds_the_prompt_it_was_sampled_from(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    one = entry([1, 2], [7, 8], [-0.5, -1.25])
    other = entry([1, 3], [7, 8], [-0.5, -1.5])
    ledger.record(one, "text")
    ledger.record(other, "text")
    assert ledger.find(choice([7, 8], [-0.5, -1.25])) == one
    assert ledger.find(choice([7, 8], [-0.5, -1.5])) == other
    assert ledger.find(choice([7, 9], [-0.5, -1.5])) is None


def test_a_choice_that_fits_two_prompts_is_not_guessed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.record(entry([1, 2], [7], [-0.50001]), "yes")
    assert ledger.find(choice([7], [-0.50001]))
    ledger.record(entry([1, 3], [7], [-0.50002]), "yes")
    assert ledger.find(choice([7], [-0.50002])) is None


def test_a_choice_that_no_model_sampled_is_not_found(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    assert ledger.find(choice([99999999999], [-0.5])) is None
    parts = {"message": {"content": [{"type": "text", "text": "x"}]}, "logprobs": None}
    assert ledger.find(parts) is None


@pytest.mark.parametrize(
    "logprobs",
    [
        {"content": [{"token": "token_id:7", "logprob": None}]},
        {"content": [{"token": "token_id:7", "logprob": 10**400}]},
        {"content": [{"token": "\ud800token_id:7", "logprob": -0.5}]},
        {"content": [{"token": 7, "logprob": -0.5}]},
        {"content": [5]},
        {"content": 5},
        [1],
    ],
)
def test_a_choice_with_invalid_logprobs_is_found_by_its_text(
    tmp_path: Path, logprobs: object
) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.record(entry([1], [7], [-0.5]), "lone \ud800")
    found = ledger.find({**choice([7], [-0.5], content="lone \ud800"), "logprobs": logprobs})
    assert found and found.completion_ids == [7]


def test_a_choice_without_tokens_is_found_by_its_text_only_if_that_is_unique(
    tmp_path: Path,
) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.record(entry([1], [7], [-0.5]), "once")
    ledger.record(entry([1], [8], [-0.5]), "twice")
    ledger.record(entry([2], [8], [-0.6]), "twice")
    bare = {"finish_reason": "stop", "message": {"content": "once"}, "logprobs": None}
    found = ledger.find(bare)
    assert found and found.completion_ids == [7]
    assert ledger.find({**bare, "message": {"content": "twice"}}) is None
    assert ledger.find({**bare, "message": {"content": None}}) is None


def test_entries_and_their_rollouts_survive_a_restart(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    entries = [entry([1], [token], [-0.5], rollout=f"r{token}") for token in (5, 6)]
    for one in entries:
        ledger.record(one, "")
    ledger.close()
    again = Ledger(tmp_path / "ledger.db")
    assert [again.find(choice([token], [-0.5])) for token in (5, 6)] == entries


def test_entries_of_old_steps_are_deleted(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    for step in (0, 1, 2):
        ledger.record(entry([1], [step], [-0.5], step=step), "")
    ledger.forget("p/m", before=2)
    kept = [bool(ledger.find(choice([step], [-0.5], content=""))) for step in (0, 1, 2)]
    assert kept == [False, False, True]


def test_choices_are_found_in_additional_histories_too() -> None:
    first, second = choice([1], [-1.0]), choice([2], [-1.0])
    user = {"role": "user", "content": "x"}
    trajectory = {
        "messages_and_choices": [user, first],
        "additional_histories": [{"messages_and_choices": [user, second]}],
    }
    assert list(choices_of([{"trajectories": [trajectory]}])) == [first, second]


def test_a_ledger_of_an_older_server_is_read_and_extended_in_place(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with sqlite3.connect(path) as db:
        db.executescript(OLD_SCHEMA)
        old = Ledger(tmp_path / "other.db")
        old.record(entry([1, 2], [7], [-0.5]), "old")
        old.close()
        db.execute("ATTACH ? AS other", (str(tmp_path / "other.db"),))
        columns = "id, fingerprint, content, model, step, lora_sha256, rollout, prompt_ids, "
        columns += "completion_ids, logprobs, created"
        db.execute(f"INSERT INTO completions SELECT {columns} FROM other.completions")
    db.close()
    for _ in range(2):  # the second start finds the new columns
        ledger = Ledger(path)
        found = ledger.find(choice([7], [-0.5]))
        assert found and (found.id, found.prompt_ids, found.constrained) == ("", [1, 2], False)
        new = entry([3], [8], [-0.5], constrained=True)
        ledger.record(new, "new")
        assert ledger.find({**choice([8], [-0.5]), "choice_id": new.id}) == new
        ledger.close()
