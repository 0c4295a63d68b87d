"""The ledger records every sampled token and the weights that sampled it. SQLite, in WAL mode.

A train request's choices are matched to their entries. Training then uses the sampled tokens, even
if a framework rebuilt the choice from its content and logprobs.
"""

import hashlib
import sqlite3
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from kit.types import Json
from trainer import exact_tokens
from trainer.exact_tokens import PREFIX, new_choice_id

# A step holds hundreds of thousands of tokens: a Python expression for each would be too slow.
_TOKEN_AND_LOGPROB = itemgetter("token", "logprob")

# Columns that ledgers of older servers lack.
_ADDED = {"choice_id": "TEXT", "constrained": "INTEGER NOT NULL DEFAULT 0"}
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
    created REAL NOT NULL,
    choice_id TEXT,
    constrained INTEGER NOT NULL DEFAULT 0
);
"""
_INDEXES = """
CREATE INDEX IF NOT EXISTS by_fingerprint ON completions (fingerprint);
CREATE INDEX IF NOT EXISTS by_content ON completions (content);
CREATE UNIQUE INDEX IF NOT EXISTS by_choice_id ON completions (choice_id);
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
    """The policy's own logprobs, which train, also of a choice that a constraint shaped."""
    id: str = field(default_factory=new_choice_id)
    """Unguessable; every answer carries it in the field `choice_id` of the choice."""
    constrained: bool = False
    """Whether the request limited the text, e.g. to a JSON schema."""


class Ledger:
    """Finds entries by the identity of a choice. Only the server's event loop writes."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        # If a power cut loses an entry, its choice is tokenized again: no need for a sync.
        self._db.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;" + _SCHEMA)
        present = {column[1] for column in self._db.execute("PRAGMA table_info(completions)")}
        for name, kind in _ADDED.items():
            if name not in present:
                self._db.execute(f"ALTER TABLE completions ADD COLUMN {name} {kind}")
        self._db.executescript(_INDEXES)

    def close(self) -> None:
        self._db.close()

    def record(self, entry: Entry, content: str) -> None:
        """Store a choice whose text is `content`."""
        self._db.execute(
            "INSERT INTO completions VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
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
                entry.id,
                entry.constrained,
            ),
        )

    def recall(self, groups: list[Json]) -> None:
        """Put the exact tokens into every choice that was sampled here.

        They replace the logprobs, which hold an object per token. This makes the journal and the
        learner's request a quarter as long.
        """
        for choice in choices_of(groups):
            if row := self._find(choice):
                exact_tokens.put(choice, *row[-3:])  # the bytes as they are stored

    def find(self, choice: Json) -> Entry | None:
        """Find a choice's entry by its tokens and logprobs, or without them by a unique text."""
        row = self._find(choice)
        if row is None:
            return None
        id, constrained, model, step, lora_sha256, rollout, *arrays = row
        prompt_ids, completion_ids, logprobs = arrays
        return Entry(
            model=model,
            step=step,
            lora_sha256=lora_sha256,
            rollout=rollout,
            prompt_ids=array("i", prompt_ids).tolist(),
            completion_ids=array("i", completion_ids).tolist(),
            logprobs=array("d", logprobs).tolist(),
            id=id or "",
            constrained=bool(constrained),
        )

    def _find(self, choice: Json) -> tuple[Any, ...] | None:
        if (id := exact_tokens.choice_id(choice)) and (rows := self._rows("choice_id", id)):
            return rows[0]
        if identity := fingerprint(choice):
            rows = self._rows("fingerprint", identity)
            # Short answers to several prompts may agree in every digit that is compared.
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
        """Delete a model's entries of steps below `before`, which are too old to train on."""
        self._db.execute("DELETE FROM completions WHERE model = ? AND step < ?", (model, before))

    def _rows(self, column: str, value: object) -> list[tuple[Any, ...]]:
        """The fields of all entries with that value; arrays of numbers are bytes."""
        found = self._db.execute(
            "SELECT choice_id, constrained, model, step, lora_sha256, rollout, prompt_ids, "
            f"completion_ids, logprobs FROM completions WHERE {column} = ? ORDER BY id",
            (value,),
        )
        return found.fetchall()


def fingerprint(choice: Json) -> bytes | None:
    """Identify a choice by tokens named `token_id:N` and their logprobs; None without them."""
    try:
        content = (choice.get("logprobs") or {}).get("content") or []
        tokens, logprobs = zip(*map(_TOKEN_AND_LOGPROB, content), strict=True)
        names = "".join(tokens)
        ours = names.count(PREFIX) == len(tokens) and None not in logprobs
        return _fingerprint(names, logprobs) if ours else None
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return None  # not a choice that was sampled here


def _fingerprint(names: str, logprobs: Sequence[float]) -> bytes:
    """Hash tokens and logprobs. The same tokens have other logprobs after another prompt.

    Logprobs are rounded: JSON preserves a double, but not every framework keeps it a double.
    """
    rounded = np.round(np.array(logprobs, dtype=np.float64), 4) + 0.0  # -0.0 is 0.0
    return _digest(names.encode() + rounded.tobytes())


def choices_of(groups: list[Json]) -> Iterator[Json]:
    """Every choice in the trajectories of `groups`, including their additional histories."""
    for group in groups:
        for trajectory in group.get("trajectories") or []:
            histories = [trajectory, *(trajectory.get("additional_histories") or [])]
            for history in histories:
                for message in history.get("messages_and_choices") or []:
                    if "finish_reason" in message and isinstance(message.get("message"), dict):
                        yield message


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
