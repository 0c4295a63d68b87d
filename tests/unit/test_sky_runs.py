"""Logs that are read over ssh first, by the files that SkyPilot writes."""

import io
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.errors import RemoteError, RunNotFound
from launcher.provider import SERVER
from launcher.skypilot import runs as sky_runs

BEGIN = "├── Waiting for task resources on 1 node.\n"


class Here:
    """The cluster is a directory."""

    def __init__(self, home: Path) -> None:
        self.home, self.ssh_config = home, home / "alias"

    def run(self, command: str) -> str:
        environment = {"HOME": str(self.home), "PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            ["bash", "-c", command], env=environment, capture_output=True, text=True
        )
        if done.returncode:
            raise RemoteError(done.stderr)
        return done.stdout


class FakeSky:
    """Follows the run that it is asked for: `more` is what it wrote since."""

    def __init__(self, home: Path, more: str) -> None:
        self.home, self.more = home, more
        self.asked: list[tuple[int | None, int]] = []

    def tail_logs(
        self, name: str, job_id: int | None, *, follow: bool, tail: int, output_stream: Any
    ) -> int:
        self.asked.append((job_id, tail))
        found = list(self.home.glob(f"sky_logs/{job_id}-*/run.log"))
        if not found:
            return 102
        _, begin, text = found[0].read_text().partition(BEGIN)
        output_stream.write(begin + text + self.more)
        return 0

    def queue(self, name: str) -> list[Any]:
        ended = SimpleNamespace(value="FAILED")
        return [{"job_id": 4, "job_name": name, "status": ended} for name in ("art", "run")]

    def get(self, request: Any) -> Any:
        return request


@pytest.fixture
def skypilot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSky:
    for run in ("1-art-cpu", "2-run", "9-my-run", "10-run", "11-run"):
        folder = tmp_path / "sky_logs" / run
        folder.mkdir(parents=True)
        (folder / "run.log").write_text(f"noise\n{BEGIN}one of {run}\ntwo of {run}\n")
    (tmp_path / "sky_logs/11-run/run.log").write_text("it has not begun\n")
    (tmp_path / "alias").touch()
    skypilot = FakeSky(tmp_path, "more\n")
    monkeypatch.setattr(sky_runs, "Remote", lambda name: Here(tmp_path))
    monkeypatch.setattr(sky_runs, "sky", lambda: skypilot)
    return skypilot


def shown(run_id: str | None, *, follow: bool = False, tail: int = 0) -> str:
    out = io.StringIO()
    sky_runs.logs("art", run_id, follow=follow, tail=tail, out=out)
    return out.getvalue()


@pytest.mark.parametrize(("run_id", "run"), [("1", "1-art-cpu"), ("10", "10-run")])
def test_a_log_is_read_without_skypilot(skypilot: FakeSky, run_id: str, run: str) -> None:
    assert shown(run_id) == f"{BEGIN}one of {run}\ntwo of {run}\n"
    assert shown(run_id, tail=1) == f"two of {run}\n"
    assert skypilot.asked == []


def test_the_server_is_the_newest_that_is_no_run(skypilot: FakeSky) -> None:
    assert shown(SERVER, tail=1) == "two of 9-my-run\n"
    shown(SERVER, follow=True, tail=1)
    assert skypilot.asked == [(9, 1)]


def test_a_followed_log_shows_every_line_once(skypilot: FakeSky, tmp_path: Path) -> None:
    with (tmp_path / "sky_logs/2-run/run.log").open("a") as log:
        log.write("half a line, and ")
    assert shown("2", follow=True) == (
        f"{BEGIN}one of 2-run\ntwo of 2-run\nhalf a line, and more\n"
    )
    assert skypilot.asked == [(2, 0)]


def test_skypilot_is_asked_for_what_ssh_does_not_find(
    skypilot: FakeSky, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RunNotFound, match="no run `77`"):
        shown("77")
    assert shown(None) == "more\n"  # the newest has not begun
    assert skypilot.asked == [(77, 0), (11, 0)]
    monkeypatch.setattr(sky_runs, "Remote", lambda name: Here(tmp_path / "gone"))
    (tmp_path / "sky_logs/1-art-cpu").rename(tmp_path / "sky_logs/4-art-cpu")
    assert shown(SERVER).endswith("two of 1-art-cpu\nmore\n")
    assert skypilot.asked[-1] == (4, 0)  # as the queue says


@pytest.mark.parametrize("size", [1, 3, 100])
def test_the_rest_of_a_log_begins_after_so_many_lines(size: int) -> None:
    text, out = "a\nbc\nd\nrest\n\nof it", io.StringIO()
    rest = sky_runs.Rest(out, 3)
    for start in range(0, len(text), size):
        rest.write(text[start : start + size])
    assert out.getvalue() == "rest\n\nof it"
