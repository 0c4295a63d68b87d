"""The ledger: what was sampled, token by token, by which weights. SQLite, in WAL mode.

At training a choice is matched to its entry, so that what is trained on is what was sampled,
also after a framework has rebuilt the choice from its content and logprobs.
"""

import hashlib
import sqlite3
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from kit.types import Json
from trainer import exact_tokens
from trainer.exact_tokens import PREFIX

# Of hundreds of thousands of tokens in a step: no line of Python for each of them.
_TOKEN_AND_LOGPROB = itemgetter("token", "logprob")

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
                _fingerprint(
                    "".join(f"{PREFIX}{id}" for id in entry.completion_ids), entry.logprobs
                ),
                _digest(content.encode(errors="surrogatepass")),
                entry.model,
                entry.step,
                entry.lora_sha256,
                entry.rollout,
                array("i", entry.prompt_ids).tobytes(),
                array("i", entry.completion_ids).tobytes(),
                array("d", entry.logprobs).tobytes(),
                time.time(),
            ),
        )

    def recall(self, groups: list[Json]) -> None:
        """Write into every choice that was sampled here the exact tokens it was sampled as.

        They replace its logprobs, an object for each token: what is journaled and sent on is a
        quarter as long.
        """
        for choice in choices_of(groups):
            if row := self._find(choice):
                exact_tokens.put(choice, *row[-3:])  # the very bytes that are stored

    def find(self, choice: Json) -> Entry | None:
        """The entry of a choice: by its tokens and logprobs, else by its text if that is unique."""
        row = self._find(choice)
        if row is None:
            return None
        *about, prompt_ids, completion_ids, logprobs = row
        numbers = array("i", prompt_ids), array("i", completion_ids), array("d", logprobs)
        return Entry(*about, *(found.tolist() for found in numbers))

    def _find(self, choice: Json) -> tuple[Any, ...] | None:
        if found := fingerprint(choice):
            rows = self._rows("fingerprint", found)
            # Short answers to several prompts may be alike to the last digit that is compared.
            same = len({prompt_ids for *_, prompt_ids, _, _ in rows}) == 1
            return rows[-1] if same else None
        content = (choice.get("message") or {}).get("content")
        is_text = isinstance(content, str) and content
        rows = (
            self._rows("content", _digest(str(content).encode(errors="surrogatepass")))
            if is_text
            else []
        )
        return rows[0] if len(rows) == 1 else None

    def forget(self, model: str, *, before: int) -> None:
        """Drop a model's entries of steps below `before`: nobody trains on them any more."""
        self._db.execute("DELETE FROM completions WHERE model = ? AND step < ?", (model, before))

    def _rows(self, column: str, value: object) -> list[tuple[Any, ...]]:
        """The fields of every `Entry` with that value, numbers as bytes."""
        found = self._db.execute(
            "SELECT model, step, lora_sha256, rollout, prompt_ids, completion_ids, logprobs "
            f"FROM completions WHERE {column} = ? ORDER BY id",
            (value,),
        )
        return found.fetchall()


def fingerprint(choice: Json) -> bytes | None:
    """What identifies a choice whose logprobs are of tokens named `token_id:N`, else None."""
    try:
        content = (choice.get("logprobs") or {}).get("content") or []
        tokens, logprobs = zip(*map(_TOKEN_AND_LOGPROB, content), strict=True)
        names = "".join(tokens)
        ours = names.count(PREFIX) == len(tokens) and None not in logprobs
        return _fingerprint(names, logprobs) if ours else None
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return None  # whatever that is, nothing here was sampled as it


def _fingerprint(names: str, logprobs: Sequence[float]) -> bytes:
    """Two prompts that gave the same tokens differ in logprobs.

    Logprobs are rounded: JSON keeps a double's value, but not every framework keeps a double.
    """
    rounded = np.round(np.array(logprobs, dtype=np.float64), 4) + 0.0  # -0.0 is 0.0
    return _digest(names.encode() + rounded.tobytes())


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
