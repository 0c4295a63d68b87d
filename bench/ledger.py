"""How long the ledger takes with a million entries: `python bench/ledger.py`.

Writes the entries in bulk, then measures what a server does with the ledger: open it, record a
choice, find one by each of its keys, and delete the entries of an old step. Needs 4 GB of disk.
"""

import argparse
import os
import sqlite3
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from trainer.server import ledger as ledgers
from trainer.server.ledger import Entry, Ledger

STEPS = 40


def fill(path: Path, rows: int, prompt: int, completion: int) -> None:
    """Insert entries of a model with `STEPS` steps, as `record` would, in one transaction."""
    Ledger(path).close()
    db = sqlite3.connect(path)
    db.execute("PRAGMA synchronous=OFF")
    prompt_ids = array("i", range(prompt)).tobytes()
    completion_ids = array("i", range(completion)).tobytes()
    logprobs = array("d", [-0.5] * completion).tobytes()
    now = time.time()
    db.execute("INSERT INTO templates VALUES (?, '{}')", (b"t" * 16,))
    db.executemany(
        "INSERT INTO completions (fingerprint, content, model, step, lora_sha256, rollout, "
        "prompt_ids, completion_ids, logprobs, created, choice_id, constrained, template) "
        "VALUES (?, ?, ?, ?, '', NULL, ?, ?, ?, ?, ?, 0, ?)",
        (
            (
                *(os.urandom(16), os.urandom(16), "p/m", number * STEPS // rows),
                *(prompt_ids, completion_ids, logprobs, now - rows + number),
                *(os.urandom(16).hex(), b"t" * 16),
            )
            for number in range(rows)
        ),
    )
    db.commit()
    db.close()


def milliseconds(work: Callable[[], object], times: int = 1) -> list[float]:
    found = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        found.append((time.perf_counter() - started) * 1000)
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--prompt", type=int, default=300, help="Tokens of each prompt.")
    parser.add_argument("--completion", type=int, default=50, help="Tokens of each choice.")
    parser.add_argument("--directory", type=Path, help="Where the file is written.")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        path = Path(directory) / "ledger.db"
        fill(path, arguments.rows, arguments.prompt, arguments.completion)
        size = path.stat().st_size
        print(f"{arguments.rows} entries, {size / 1e9:.2f} GB")
        opened: list[Ledger] = []

        def show(what: str, work: Callable[[], object], times: int = 1) -> None:
            took = milliseconds(work, times)
            print(f"{what}: median {took[times // 2]:.2f} ms, worst {took[-1]:.2f} ms")

        def record(ledger: Ledger, prompt: int) -> str:
            entry = Entry("", 0, "", None, [*range(prompt)], [7] * 50, [-0.5] * 50)
            ledger.record(entry, "text")
            return entry.id

        show("open", lambda: opened.append(Ledger(path)))
        (ledger,) = opened
        show("record", lambda: record(ledger, arguments.prompt), 2000)
        id = record(ledger, arguments.prompt)
        show("find by id", lambda: ledger.with_id(id), 1000)
        show("find by an unknown id", lambda: ledger.with_id(os.urandom(16).hex()), 1000)
        show("find by tokens", lambda: ledger.with_fingerprint(os.urandom(16)), 1000)
        show("find by text", lambda: ledger.with_content(os.urandom(8).hex()), 1000)
        show("delete the entries of a step", lambda: ledger.forget("p/m", before=1))
        show("delete when there are none", lambda: ledger.forget("p/m", before=1), 10)
        ledger.close()
        ledgers.RECENT_SECONDS = 0
        smaller = Ledger(path, max_bytes=size // 2)
        show("record while the ledger shrinks", lambda: record(smaller, arguments.prompt), 2000)
        smaller.close()


if __name__ == "__main__":
    main()
