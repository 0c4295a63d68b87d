"""Reads the groups, attempts and tokens of one kept step."""

import json
import math
import re
import sqlite3
from typing import Any

from kit.types import Json
from trainer.errors import BadRequest, NotFound
from trainer.page import batches
from trainer.page.batches import TRAIN
from trainer.page.reader import Run, finite

CUT = 20_000
"""Characters of a message that the list of a group's attempts holds."""
MOST_TOKENS = 20_000
_GROUP = "id, example, size, mean, spread, low, high, trainable, dropped, preview"
_ATTEMPT = (
    "id, group_id, number, example, reward, advantage, parts, metadata, logs, n_turns, n_tokens,"
    " finish, messages, error"
)
_SPLIT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_EXPLANATION = re.compile(r"(\w[\w -]{0,40}) explanation: (.*)", re.DOTALL)


def step(run: Run, number: int, split: str = TRAIN) -> Json:
    """The groups of a step, its settings and its metrics."""
    with batches.opened(_path(run, number, split)) as db:
        about = {key: json.loads(value) for key, value in db.execute("SELECT * FROM step")}
        rows = db.execute(f"SELECT {_GROUP} FROM groups ORDER BY id").fetchall()
    metrics = run.history.steps.get(number, {})
    return {
        **{"step": number, "split": split},
        "groups": [_group(row) for row in rows],
        "settings": about.get("config") or {},
        "metrics": dict(sorted(metrics.items())),
    }


def group(
    run: Run, number: int, id: int, split: str = TRAIN, *, offset: int = 0, limit: int = 64
) -> Json:
    """A group and its attempts, with long messages cut."""
    with batches.opened(_path(run, number, split)) as db:
        row = db.execute(f"SELECT {_GROUP} FROM groups WHERE id = ?", (id,)).fetchone()
        if row is None:
            raise NotFound(f"Step `{number}` has no group `{id}`", hint="Open the step again")
        query = f"SELECT {_ATTEMPT} FROM attempts WHERE group_id = ? ORDER BY id LIMIT ? OFFSET ?"
        attempts = [_attempt(found, CUT) for found in db.execute(query, (id, limit, offset))]
    return {"group": _group(row), "attempts": attempts}


def attempt(run: Run, number: int, id: int, split: str = TRAIN) -> Json:
    """One attempt, uncut."""
    with batches.opened(_path(run, number, split)) as db:
        return _attempt(_find(db, number, id), None)


def tokens(
    run: Run, number: int, id: int, split: str = TRAIN, *, offset: int = 0, limit: int = 4000
) -> Json:
    """Tokens of an attempt from `offset` on, over all its sequences, in columns."""
    limit = min(limit, MOST_TOKENS)
    with batches.opened(_path(run, number, split)) as db:
        _find(db, number, id)
        query = "SELECT * FROM tokens WHERE attempt_id = ? ORDER BY sequence"
        columns: dict[str, list[Any]] = {
            name: []
            for name in (
                *("id", "text", "mask", "logprob", "learner", "advantage", "weight"),
                *("sequence", "policy_step"),
            )
        }
        total = 0
        for row in db.execute(query, (id,)):
            ids: list[int] = list(batches.unpack_array("i", row[2]) or [])
            low, high = max(offset - total, 0), min(offset + limit - total, len(ids))
            total += len(ids)
            if low < high:
                _add_tokens(columns, row, ids[low:high], low, high)
        pieces = _pieces(db, set(columns["id"]))
    columns["text"] = [pieces.get(token) for token in columns["id"]]
    return {"total": total, **columns}


def _add_tokens(
    columns: dict[str, list[Any]], row: tuple[Any, ...], ids: list[int], low: int, high: int
) -> None:
    _, sequence, _, mask, logprobs, learner, advantage, weight, spans = row
    chosen = list(batches.unpack_array("B", mask) or [])[low:high]
    columns["id"] += ids
    columns["mask"] += chosen
    for name, data in (("logprob", logprobs), ("learner", learner)):
        numbers = batches.unpack_array("f", data)
        columns[name] += map(_number, numbers[low:high]) if numbers else [None] * len(ids)
    columns["advantage"] += [finite(advantage) if it else None for it in chosen]
    columns["weight"] += [finite(weight) if it else None for it in chosen]
    columns["sequence"] += [sequence] * len(ids)
    steps: list[int | None] = [None] * len(ids)
    for start, end, policy_step in json.loads(spans or "[]"):
        for place in range(max(start, low), min(end, high)):
            steps[place - low] = policy_step if chosen[place - low] else None
    columns["policy_step"] += steps


def _number(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None


def _pieces(db: sqlite3.Connection, ids: set[int]) -> dict[int, str]:
    wanted = sorted(ids)
    found: dict[int, str] = {}
    for at in range(0, len(wanted), 500):
        part = wanted[at : at + 500]
        marks = ", ".join("?" * len(part))
        found.update(db.execute(f"SELECT id, text FROM pieces WHERE id IN ({marks})", part))
    return found


def _path(run: Run, number: int, split: str) -> Any:
    if not _SPLIT.fullmatch(split):
        raise BadRequest(f"There is no split `{split[:40]}`", hint="Use `train` or `val`")
    return batches.path_of(run.directory, number, split)


def _find(db: sqlite3.Connection, number: int, id: int) -> tuple[Any, ...]:
    row: tuple[Any, ...] | None = db.execute(
        f"SELECT {_ATTEMPT} FROM attempts WHERE id = ?", (id,)
    ).fetchone()
    if row is None:
        raise NotFound(f"Step `{number}` has no attempt `{id}`", hint="Open the step again")
    return row


def _group(row: tuple[Any, ...]) -> Json:
    id, example, size, mean, spread, low, high, trainable, dropped, preview = row
    return {
        **{"id": id, "example": example, "n": size, "mean": mean, "spread": spread},
        **{"min": low, "max": high, "trainable": bool(trainable), "dropped": dropped},
        "preview": preview,
    }


def _attempt(row: tuple[Any, ...], most: int | None) -> Json:
    id, group_id, number, example, reward, advantage, parts, metadata, logs, *rest = row
    turns, count, finish, messages, error = rest
    about, said = json.loads(metadata), json.loads(logs)
    return {
        **{"id": id, "group": group_id, "number": number, "example": example},
        **{"reward": finite(reward), "advantage": finite(advantage)},
        "parts": {name: finite(value) for name, value in json.loads(parts).items()},
        **{"metadata": about, "logs": said, "turns": turns, "tokens": count},
        **{"finish": finish, "error": error, "judge": judgements(about, said)},
        "conversations": [
            {**it, "messages": [_cut(message, most) for message in it["messages"]]}
            for it in batches.unpack_json(messages)
        ],
    }


def _cut(message: Json, most: int | None) -> Json:
    content = message.get("content")
    if most is None or not isinstance(content, str) or len(content) <= most:
        return message
    return {**message, "content": content[:most], "cut": len(content) - most}


def judgements(metadata: Json, logs: list[str]) -> list[Json]:
    """A judge's reasons: metadata `reason/NAME`, and log lines like RULER's `NAME explanation:`."""
    found = [
        {"name": key.removeprefix("reason/"), "reason": str(value)}
        for key, value in metadata.items()
        if key.startswith("reason/") and value
    ]
    for line in logs:
        if match := _EXPLANATION.fullmatch(line):
            found.append({"name": match[1], "reason": match[2]})
    return found
