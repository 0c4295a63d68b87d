"""The ledger: what was sampled, token by token, by which weights. SQLite, in WAL mode.

At training a choice is matched to its entry, so that what is trained on is what was sampled,
also after a framework has rebuilt the choice from its content and logprobs.
"""

import array
import hashlib
import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.exact_tokens import ExactTokens

Json = dict[str, Any]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS completions (
    id INTEGER PRIMARY KEY,
    fingerprint BLOB NOT NULL,
    content BLOB NOT NULL,
    model TEXT NOT NULL,
    step INTEGER NOT NULL,
    lora_sha256 TEXT NOT NULL,
    rollout TEXT,
    prompt_ids BLOB NOT NULL,
    completion_ids BLOB NOT NULL,
    logprobs BLOB NOT NULL,
    created REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS by_fingerprint ON completions (fingerprint);
CREATE INDEX IF NOT EXISTS by_content ON completions (content);
"""


@dataclass(frozen=True)
class Entry:
    """One sampled choice."""

    model: str
    """`PROJECT/NAME`, or empty for the base model."""
    step: int
    lora_sha256: str
    rollout: str | None
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]


class Ledger:
    """Entries by what identifies a choice. One writer: the server's event loop."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        # An entry that a power cut loses only means that a choice is tokenised again.
        self._db.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;" + _SCHEMA)

    def close(self) -> None:
        self._db.close()

    def record(self, entry: Entry, content: str) -> None:
        self._db.execute(
            "INSERT INTO completions VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                fingerprint(entry.completion_ids, entry.logprobs),
                _digest(content.encode()),
                entry.model,
                entry.step,
                entry.lora_sha256,
                entry.rollout,
                array.array("i", entry.prompt_ids).tobytes(),
                array.array("i", entry.completion_ids).tobytes(),
                array.array("d", entry.logprobs).tobytes(),
                time.time(),
            ),
        )

    def recall(self, groups: list[Json]) -> None:
        """Write into every choice that was sampled here the exact tokens it was sampled as.

        They replace its logprobs, an object for each token: what is journaled and sent on is a
        quarter as long.
        """
        for choice in choices_of(groups):
            if entry := self.find(choice):
                ExactTokens(entry.prompt_ids, entry.completion_ids, entry.logprobs).put(choice)

    def find(self, choice: Json) -> Entry | None:
        """The entry of a choice: by its tokens and logprobs, else by its text if that is unique."""
        tokens = exact_tokens(choice)
        if tokens is not None:
            rows = self._rows("fingerprint", fingerprint(*tokens))
            # Short answers to several prompts may be alike to the last digit that is compared.
            same = all(row.prompt_ids == rows[-1].prompt_ids for row in rows)
            return rows[-1] if rows and same else None
        content = (choice.get("message") or {}).get("content")
        is_text = isinstance(content, str) and content
        rows = self._rows("content", _digest(str(content).encode())) if is_text else []
        return rows[0] if len(rows) == 1 else None

    def forget(self, model: str, *, before: int) -> None:
        """Drop a model's entries of steps below `before`: nobody trains on them any more."""
        self._db.execute("DELETE FROM completions WHERE model = ? AND step < ?", (model, before))

    def _rows(self, column: str, value: object) -> list[Entry]:
        found = self._db.execute(
            "SELECT model, step, lora_sha256, rollout, prompt_ids, completion_ids, logprobs "
            f"FROM completions WHERE {column} = ? ORDER BY id",
            (value,),
        )
        return [
            Entry(
                model,
                step,
                sha256,
                rollout,
                array.array("i", prompt).tolist(),
                array.array("i", completion).tolist(),
                array.array("d", logprobs).tolist(),
            )
            for model, step, sha256, rollout, prompt, completion, logprobs in found
        ]


def fingerprint(ids: Sequence[int], logprobs: Sequence[float]) -> bytes:
    """Identifies a sampled sequence. Two prompts that gave the same ids differ in logprobs.

    Logprobs are rounded: JSON keeps a double's value, but not every framework keeps a double.
    """
    rounded = "%.4f " * len(logprobs) % tuple(logprobs)
    return _digest(array.array("i", ids).tobytes() + rounded.encode())


def exact_tokens(choice: Json) -> tuple[list[int], list[float]] | None:
    """Ids and logprobs of a choice whose logprob tokens are `token_id:N`, else None."""
    content = (choice.get("logprobs") or {}).get("content") or []
    ids, logprobs = [], []
    for entry in content:
        prefix, _, number = str(entry.get("token")).partition(":")
        logprob = entry.get("logprob")
        # Ten digits and more are no token of any model's, and nulls no logprob of ours.
        if prefix != "token_id" or not number.isdigit() or len(number) > 9 or logprob is None:
            return None
        ids.append(int(number))
        logprobs.append(float(logprob))
    return (ids, logprobs) if ids else None


def choices_of(groups: list[Json]) -> Iterator[Json]:
    """Every choice in the trajectories of `groups`, those of additional histories included."""
    for group in groups:
        for trajectory in group.get("trajectories") or []:
            histories = [trajectory, *(trajectory.get("additional_histories") or [])]
            for history in histories:
                for message in history.get("messages_and_choices") or []:
                    if "finish_reason" in message and isinstance(message.get("message"), dict):
                        yield message


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
