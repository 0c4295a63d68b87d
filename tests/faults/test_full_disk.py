"""A disk that is full at every write of a step in turn, then freed: the step is trained once.

The state directory is a small file system in memory, in a mount namespace of the server's own.
"""

import json
import os
import random
from pathlib import Path

import httpx
import pytest

from tests.faults.patient import BASE, Refused, ask_for_step, hashes, prepare, sample, train
from tests.serving import Serving

ROUNDS = 5
SIZE = 64 << 20
INODES = 4000


def in_memory(then: str = "true") -> tuple[str, ...]:
    """Start a command on a small file system, after the shell command `then`."""
    mount = f'mount -t tmpfs -o size={SIZE},nr_inodes={INODES} tmpfs "$0"'
    shell = ("unshare", "--mount", "--user", "--map-root-user", "sh", "-c")
    return (*shell, f'{mount} && {{ {then}; }} && exec "$@"')


FULL = 'dd if=/dev/zero of="$0/ballast" bs=1M 2>/dev/null; true'
READ_ONLY = 'mount -o remount,ro "$0"'


class SmallDisk:
    """The server's file system, seen from outside of its namespace."""

    def __init__(self, serving: Serving) -> None:
        self._root = Path(f"/proc/{serving.process.pid}/root{serving.state.parent}")
        self._ballast = self._root / "ballast"
        self._ballast.mkdir()

    def free(self) -> int:
        about = os.statvfs(self._root)
        return about.f_bavail * about.f_frsize

    def free_inodes(self) -> int:
        return os.statvfs(self._root).f_favail

    def leave(self, size: int) -> None:
        """Fill all but `size` bytes."""
        (self._ballast / "0").touch()
        with (self._ballast / "0").open("wb") as file:
            file.write(bytes(max(0, self.free() - size)))

    def leave_inodes(self, count: int) -> None:
        for number in range(self.free_inodes() - count):
            (self._ballast / f"{number}").touch()

    def clear(self) -> None:
        for path in self._ballast.iterdir():
            path.unlink()


def check(refused: Refused) -> None:
    """507, and a sentence: never a traceback or an error of nobody's."""
    assert refused.status == 507, refused
    error = json.loads(refused.text)
    assert "Traceback" not in refused.text and "space" in json.dumps(error), refused.text


@pytest.mark.parametrize("what", ["bytes", "inodes"])
def test_a_full_disk_at_every_write_of_a_step_costs_nothing_but_time(
    what: str, tmp_path: Path, chance: random.Random, rounds: int
) -> None:
    small = Serving(tmp_path / "small", BASE, prefix=(*in_memory(), str(tmp_path / "small")))
    with Serving(tmp_path / "calm", BASE) as calm, small:
        disk = SmallDisk(small)
        small_state = small.state
        small.state = disk._root / small_state.name
        before = 0, 0
        for step in (1, 2):
            before = disk.free(), disk.free_inodes()
            train(calm, step)
            train(small, step)
        needed = before[0] - disk.free() if what == "bytes" else before[1] - disk.free_inodes()
        refusals = 0
        for number in range(ROUNDS * rounds):
            step += 1
            train(calm, step)
            room = int(1.2 * needed * number / (ROUNDS * rounds - 1))
            if what == "bytes":
                disk.leave(room + chance.randrange(4096))
            else:
                disk.leave_inodes(room)
            try:
                ask_for_step(small, step)
            except Refused as refused:
                check(refused)
                refusals += 1
            except httpx.TransportError:  # an answer that had begun
                refusals += 1
            assert httpx.get(f"{small.control}/health", timeout=60).status_code in (200, 503)
            disk.clear()
            train(small, step)
            assert prepare(small) == step
            assert hashes(small) == hashes(calm), f"{room} {what} were left"
        assert refusals, "no write failed"
        assert sample(small) == step
        print(f"{refusals} of {ROUNDS * rounds} steps were refused first")  # noqa: T201


@pytest.mark.parametrize(
    ("before", "named", "status"), [(FULL, "is full", 507), (READ_ONLY, "is read-only", 503)]
)
def test_a_server_that_starts_on_a_disk_that_takes_nothing_serves_and_names_it(
    tmp_path: Path, before: str, named: str, status: int
) -> None:
    with Serving(tmp_path, BASE, prefix=(*in_memory(before), str(tmp_path))) as serving:
        chat = {"model": BASE, "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
        url = f"{serving.openai}/v1/chat/completions"
        assert httpx.post(url, json=chat, timeout=120).status_code == 200
        health = httpx.get(f"{serving.control}/health", timeout=60).json()
        assert health["status"] == "degraded"
        assert any(named in line for line in health["reasons"]), health
        with pytest.raises(Refused) as refused:
            prepare(serving)
        assert refused.value.status == status, refused.value
        assert "Traceback" not in serving.log.read_text()
    assert serving.process.returncode == 0
