"""The file of a trained step, `batches/0007.db`: its groups, attempts and tokens. Write and open.

Each file is complete or absent: it is written under another name and renamed. `0007.val.db` holds
the attempts that a client logged at step 7 for the split `val`, in the same tables.
"""

import contextlib
import json
import math
import os
import shutil
import sqlite3
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kit.state_dir import BATCHES, GROUPS, step_name
from kit.types import Json
from trainer.errors import DamagedBatch, NotFound

TRAIN = "train"
PREVIEW = 200
"""Characters of an attempt's last answer that a list of attempts shows."""
_SCHEMA = """
CREATE TABLE step (key TEXT PRIMARY KEY, value TEXT);
CREATE TABLE groups (
    id INTEGER PRIMARY KEY, example TEXT, split TEXT, mean REAL, spread REAL, low REAL, high REAL,
    size INTEGER, trainable INTEGER, dropped TEXT, preview TEXT);
CREATE TABLE attempts (
    id INTEGER PRIMARY KEY, group_id INTEGER, number INTEGER, example TEXT, reward REAL,
    advantage REAL, parts TEXT, metadata TEXT, logs TEXT, n_turns INTEGER, n_tokens INTEGER,
    finish TEXT, preview TEXT, messages BLOB, error TEXT);
CREATE INDEX by_group ON attempts (group_id);
CREATE TABLE tokens (
    attempt_id INTEGER, sequence INTEGER, ids BLOB, mask BLOB, logprobs BLOB, learner BLOB,
    advantage REAL, weight REAL, policy_steps TEXT, PRIMARY KEY (attempt_id, sequence));
CREATE TABLE pieces (id INTEGER PRIMARY KEY, text TEXT);
"""


@dataclass
class TokenSequence:
    """One sequence of tokens, with what each was sampled and trained with."""

    ids: "array[int]"
    mask: bytes
    """1 where the policy chose the token."""
    logprobs: "array[float]"
    """The sampler's; NaN where unknown."""
    learner: "array[float] | None" = None
    """The learner's logprobs when it trained the tokens; NaN where it computed none."""
    advantage: float | None = None
    weight: float | None = None
    policy_steps: list[tuple[int, int, int]] = field(default_factory=list)
    """(start, end, step) of the tokens that each step sampled."""


@dataclass
class Attempt:
    """One trajectory of a group."""

    number: int
    reward: float | None
    conversations: list[Json]
    """`{"messages": [...]}` for the conversation and each additional history."""
    example: str | None = None
    advantage: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    metadata: Json = field(default_factory=dict)
    logs: Sequence[str] = ()
    turns: int = 0
    tokens: int = 0
    """Number of tokens that the policy chose."""
    finish: str | None = None
    preview: str = ""
    error: str | None = None
    sequences: list[TokenSequence] = field(default_factory=list)


@dataclass
class Group:
    """The attempts at one example."""

    attempts: list[Attempt]
    example: str | None = None
    trainable: bool = False
    dropped: str | None = None
    """Why the group was not trained on."""

    @property
    def rewards(self) -> list[float]:
        return [
            attempt.reward
            for attempt in self.attempts
            if attempt.reward is not None and math.isfinite(attempt.reward)
        ]

    @property
    def mean(self) -> float | None:
        rewards = self.rewards
        return sum(rewards) / len(rewards) if rewards else None

    @property
    def spread(self) -> float | None:
        """The standard deviation of the rewards."""
        mean, rewards = self.mean, self.rewards
        if mean is None:
            return None
        return math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))


def path_of(run: Path, step: int, split: str = TRAIN) -> Path:
    """The file of a step below the directory of a run."""
    return run / BATCHES / f"{step_name(step)}{'' if split == TRAIN else f'.{split}'}.db"


def kept_steps(run: Path) -> dict[str, list[int]]:
    """The steps that have a file, by split, lowest first."""
    found: dict[str, list[int]] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(run / BATCHES):
            step, _, rest = name.partition(".")
            if step.isdigit() and rest.endswith("db"):
                found.setdefault(rest[:-3] or TRAIN, []).append(int(step))
    return {split: sorted(steps) for split, steps in found.items()}


def write(
    path: Path, about: Json, groups: Sequence[Group], pieces: Mapping[int, str], *, split: str
) -> None:
    """Write the file of a step; groups of a split that are logged later are added to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        if split != TRAIN and path.is_file() and _is_whole(path):
            shutil.copyfile(path, temporary)
        with contextlib.closing(sqlite3.connect(temporary, isolation_level=None)) as db:
            # The file is renamed when it is complete, so a journal would protect nothing.
            db.executescript("PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF;")
            if not db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
                db.executescript(_SCHEMA)
            db.execute("BEGIN")
            _insert(db, about, groups, pieces, split)
            db.execute("COMMIT")
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    _append_means(path.parent / GROUPS, about, groups, split)


def _insert(
    db: sqlite3.Connection,
    about: Json,
    groups: Sequence[Group],
    pieces: Mapping[int, str],
    split: str,
) -> None:
    values = [(key, json.dumps(value)) for key, value in about.items()]
    db.executemany("INSERT OR REPLACE INTO step VALUES (?, ?)", values)
    db.executemany("INSERT OR IGNORE INTO pieces VALUES (?, ?)", pieces.items())
    for group in groups:
        rewards = group.rewards
        row = (
            *(group.example, split, group.mean, group.spread),
            *(min(rewards, default=None), max(rewards, default=None), len(group.attempts)),
            *(group.trainable, group.dropped),
            group.attempts[0].preview if group.attempts else "",
        )
        marks = "NULL, " + ", ".join("?" * len(row))
        group_id = db.execute(f"INSERT INTO groups VALUES ({marks})", row).lastrowid
        for attempt in group.attempts:
            _insert_attempt(db, group_id, attempt)


def _insert_attempt(db: sqlite3.Connection, group_id: int | None, attempt: Attempt) -> None:
    row = (
        *(group_id, attempt.number, attempt.example, attempt.reward, attempt.advantage),
        *(json.dumps(value) for value in (attempt.parts, attempt.metadata, list(attempt.logs))),
        *(attempt.turns, attempt.tokens, attempt.finish, attempt.preview[:PREVIEW]),
        *(_pack(json.dumps(attempt.conversations).encode()), attempt.error),
    )
    marks = "NULL, " + ", ".join("?" * len(row))
    id = db.execute(f"INSERT INTO attempts VALUES ({marks})", row).lastrowid
    db.executemany(
        "INSERT INTO tokens VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (
                *(id, number, _pack(sequence.ids.tobytes()), _pack(sequence.mask)),
                _pack(sequence.logprobs.tobytes()),
                None if sequence.learner is None else _pack(sequence.learner.tobytes()),
                *(sequence.advantage, sequence.weight, json.dumps(sequence.policy_steps)),
            )
            for number, sequence in enumerate(attempt.sequences)
        ],
    )


def _pack(data: bytes) -> bytes:
    return zlib.compress(data, 1)


def _append_means(path: Path, about: Json, groups: Sequence[Group], split: str) -> None:
    """Append the means of a step, which outlive its file, to the run's file of groups."""
    # A run that was lost has no text, and would look like a short one.
    attempts = [it for group in groups for it in group.attempts if it.conversations or it.tokens]
    lengths = [attempt.tokens for attempt in attempts]
    line = {
        **{"step": about.get("step"), "split": split},
        "groups": [
            [group.example, len(group.attempts), group.mean, group.spread] for group in groups
        ],
        "tokens": sum(lengths) / len(lengths) if lengths else None,
        "parts": mean_parts(attempts),
        "repeated": repeated_share(attempts),
    }
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def mean_parts(attempts: Sequence[Attempt]) -> dict[str, float]:
    """The mean of each part of the reward over the attempts that have it."""
    found: dict[str, list[float]] = {}
    for attempt in attempts:
        for name, value in attempt.parts.items():
            if math.isfinite(value):
                found.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}


def repeated_share(attempts: Sequence[Attempt]) -> float | None:
    """The share of attempts whose last answer begins like that of another attempt."""
    previews = [attempt.preview for attempt in attempts if attempt.preview]
    if not previews:
        return None
    return 1 - len(set(previews)) / len(previews)


def _is_whole(path: Path) -> bool:
    try:
        with opened(path) as db:
            return bool(db.execute("PRAGMA quick_check(1)").fetchone() == ("ok",))
    except DamagedBatch:
        return False


@contextlib.contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a file for reading. Faults of SQLite become one error that names the file."""
    if not path.is_file():
        raise NotFound(
            f"`{path.name}` is not on disk",
            hint="The step was not trained here, or `--keep-rollouts` deleted it: oldest first",
        )
    try:
        # Files never change after the rename, so no lock is needed, nor a writable directory.
        uri = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as db:
            yield db
    except (sqlite3.Error, zlib.error, ValueError) as error:
        raise DamagedBatch(f"`{path.name}` cannot be read: {error}") from error


def unpack_json(data: bytes) -> Any:
    return json.loads(zlib.decompress(data))


def unpack_array(kind: str, data: bytes | None) -> "array[Any] | None":
    if data is None:
        return None
    numbers = array(kind)
    numbers.frombytes(zlib.decompress(data))
    return numbers
