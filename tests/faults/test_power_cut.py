"""A power cut at a random moment: what was not synced is gone, and no answered step is lost.

The server's processes record what they sync. After `kill -9` the state directory is rebuilt as a
disk may hold it: each directory with the names it had when it was last synced, each file with the
content it had then. What was not synced may be on the disk too, so that some rounds keep a part.
"""

import json
import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from kit.manifest import damage
from tests.faults.patient import BASE, Refused, ask_for_step, hashes, prepare, sample, train
from tests.processes import children, wait_until_gone
from tests.serving import ROOT, Serving

ROUNDS = 2
RECORDER = Path(__file__).parent / "recorder"


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory on tmpfs, which never gives the number of a deleted inode to another file."""
    directory = Path(tempfile.mkdtemp(prefix="power-cut-", dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory)


class Disk:
    """The state directory as it is after a power cut."""

    def __init__(
        self, state: Path, record: Path, chance: random.Random, *, keeps_some: bool
    ) -> None:
        self.state = state
        self._record = record
        self._chance = chance
        self._paths = {path.lstat().st_ino: path for path in state.rglob("*")}
        self.keeps_some = keeps_some

    def write(self, target: Path) -> None:
        self._directory(self.state.stat().st_ino, self.state, target)
        for path in self.state.glob("*.db*"):  # SQLite syncs by itself, unseen by the recorder
            shutil.copy2(path, target / path.name)

    def _directory(self, inode: int, now: Path | None, target: Path) -> None:
        target.mkdir()
        found = self._record / str(inode)
        names = json.loads(found.read_bytes()) if found.is_file() else {}
        if now is not None and self._keeps():
            names = {
                path.name: [path.lstat().st_ino, path.is_dir()] for path in sorted(now.iterdir())
            }
        for name, (number, is_directory) in names.items():
            path = self._paths.get(number)
            if is_directory:
                self._directory(number, path, target / name)
            elif not name.endswith((".db", "-wal", "-shm")):
                (target / name).write_bytes(self._content(number, path))

    def _content(self, inode: int, now: Path | None) -> bytes:
        found = self._record / str(inode)
        synced = found.read_bytes() if found.is_file() else b""
        if now is None or not self._keeps():
            return synced
        content = now.read_bytes()
        return content[: max(len(synced), self._chance.randint(0, len(content)))]

    def _keeps(self) -> bool:
        return self.keeps_some and self._chance.random() < 0.5


def start(memory: Path, number: int) -> tuple[Serving, Path]:
    directory, record = memory / str(number), memory / f"{number}-synced"
    record.mkdir()
    path = os.pathsep.join([str(RECORDER), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return Serving(directory, BASE, PYTHONPATH=path, RECORD_SYNCED=str(record)), record


def cut(serving: Serving, step: int, after_s: float) -> None:
    """Ask for a step, and kill everything at a moment of it."""

    def ask() -> None:
        with suppress(httpx.TransportError, Refused):
            ask_for_step(serving, step)

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(after_s)
    everyone = [serving.process.pid, *children(serving.process.pid)]
    serving.process.kill()
    serving.process.wait(120)
    wait_until_gone(everyone)
    asking.join()


def test_a_power_cut_loses_no_step_that_was_answered(
    memory: Path, tmp_path: Path, chance: random.Random, rounds: int
) -> None:
    with Serving(tmp_path / "calm", BASE) as calm:
        step = 0
        stormy, record = start(memory, 0)
        stormy.start()
        try:
            for number in range(1, ROUNDS * rounds + 1):
                for _ in range(chance.randint(1, 2)):
                    step += 1
                    began = time.monotonic()
                    train(calm, step)
                    usual_s = time.monotonic() - began
                    train(stormy, step)
                after_s = chance.choice([0, chance.uniform(0, 1.5 * usual_s)])
                cut(stormy, step + 1, after_s)
                disk = Disk(stormy.state, record, chance, keeps_some=number % 2 == 0)
                told = f"round {number}: cut {after_s:.2f} s into step {step + 1}"
                print(told, "with some of the rest" if disk.keeps_some else "")  # noqa: T201
                stormy, record = start(memory, number)
                stormy.state.parent.mkdir()
                disk.write(stormy.state)
                # What is on the disk already needs no sync again.
                for path in [stormy.state, *stormy.state.rglob("*")]:
                    _remember(path, record)
                stormy.start()
                assert prepare(stormy) in (step, step + 1), told
                step += 1
                train(calm, step)
                train(stormy, step)
                assert hashes(stormy) == hashes(calm), told
                for path in stormy.state.glob("*/models/*/checkpoints/[0-9]*"):
                    assert not damage(path), told
            assert sample(stormy) == step
        finally:
            stormy.process.terminate()
            stormy.process.wait(120)


def _remember(path: Path, record: Path) -> None:
    if path.is_dir():
        names = {it.name: [it.lstat().st_ino, it.is_dir()] for it in path.iterdir()}
        content = json.dumps(names).encode()
    else:
        content = path.read_bytes()
    (record / str(path.stat().st_ino)).write_bytes(content)
