"""Logs of runs, from the files that SkyPilot writes if ssh finds them, and else from SkyPilot."""

import io
import subprocess
from pathlib import Path

import pytest

from launcher.errors import RemoteError, RunNotFound
from launcher.provider import SERVER
from launcher.skypilot import runs as sky_runs
from launcher.skypilot.provider import SkyProvider
from launcher.skypilot.testing import FakeJob, FakeQueue, FakeSky, FakeStatus

BEGIN = "├── Waiting for task resources on 1 node.\n"


class DirectoryRemote:
    """A `Remote` whose cluster is a directory."""

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


@pytest.fixture
def skypilot(sky: FakeSky, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSky:
    """SkyPilot shows `more` after the lines that a run's file holds."""
    sky.make_cluster("art")
    for run in ("1-art-cpu", "2-run", "9-my-run", "10-run", "11-run"):
        folder = tmp_path / "sky_logs" / run
        folder.mkdir(parents=True)
        log = f"{BEGIN}one of {run}\ntwo of {run}\n"
        (folder / "run.log").write_text(f"noise\n{log}")
        number, _, name = run.partition("-")
        sky.queues["art"][int(number)] = FakeJob(name, log=f"{log}more\n")
    (tmp_path / "sky_logs/11-run/run.log").write_text("it has not begun\n")
    sky.queues["art"][11].log = "more\n"
    (tmp_path / "alias").touch()
    monkeypatch.setattr(sky_runs, "Remote", lambda name: DirectoryRemote(tmp_path))
    return sky


def shown(run_id: str | None, *, follow: bool = False, tail: int = 0) -> str:
    out = io.StringIO()
    sky_runs.logs("art", run_id, follow=follow, tail=tail, out=out)
    return out.getvalue()


@pytest.mark.parametrize(("run_id", "run"), [("1", "1-art-cpu"), ("10", "10-run")])
def test_a_log_is_read_without_skypilot(skypilot: FakeSky, run_id: str, run: str) -> None:
    assert shown(run_id) == f"{BEGIN}one of {run}\ntwo of {run}\n"
    assert shown(run_id, tail=1) == f"two of {run}\n"
    assert skypilot.tailed == []


def test_the_server_is_the_newest_run_of_another_name_than_run(skypilot: FakeSky) -> None:
    assert shown(SERVER, tail=1) == "two of 9-my-run\n"
    shown(SERVER, follow=True, tail=1)
    assert skypilot.tailed == [(9, True, 1)]


def test_a_followed_log_shows_every_line_once(skypilot: FakeSky, tmp_path: Path) -> None:
    with (tmp_path / "sky_logs/2-run/run.log").open("a") as log:
        log.write("half a line, and ")
    whole = f"{BEGIN}one of 2-run\ntwo of 2-run\nhalf a line, and more\n"
    skypilot.queues["art"][2].log = whole
    assert shown("2", follow=True) == whole
    assert skypilot.tailed == [(2, True, 0)]


def test_skypilot_shows_a_log_that_ssh_does_not_find(
    skypilot: FakeSky, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RunNotFound, match="no run `77`"):
        shown("77")
    assert shown(None) == "more\n"  # the newest has not begun
    assert skypilot.tailed == [(77, False, 0), (11, False, 0)]
    monkeypatch.setattr(sky_runs, "Remote", lambda name: DirectoryRemote(tmp_path / "missing"))
    skypilot.queues["art"] = FakeQueue(
        {
            4: FakeJob("art", FakeStatus.FAILED, "two of 1-art-cpu\nmore\n"),
            5: FakeJob("run", FakeStatus.FAILED),
        }
    )
    assert shown(SERVER).endswith("two of 1-art-cpu\nmore\n")
    assert skypilot.tailed[-1] == (4, False, 0)  # from SkyPilot's queue


@pytest.mark.parametrize("size", [1, 3, 100])
def test_lines_that_were_shown_already_are_skipped(size: int) -> None:
    text, out = "a\nbc\nd\nrest\n\nof it", io.StringIO()
    rest = sky_runs.SkipLines(out, 3)
    for start in range(0, len(text), size):
        rest.write(text[start : start + size])
    assert out.getvalue() == "rest\n\nof it"


def test_a_run_reaches_every_machine_because_skypilot_would_choose_any(sky: FakeSky) -> None:
    sky.make_cluster("one")
    sky.nodes = 3
    sky.make_cluster("three")
    for name in ("one", "three"):
        SkyProvider().run(name, "true", {}, {})
    assert [config["num_nodes"] for config in sky.executed] == [1, 3]
