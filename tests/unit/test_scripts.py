"""The scripts that run on a cluster, in a real bash whose home is a temporary directory."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from launcher.skypilot import scripts


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "sky_workdir").mkdir()
    (tmp_path / "bin").mkdir()
    getent = tmp_path / "bin" / "getent"  # makes it the account's home
    getent.write_text(f"#!/bin/sh\necho me:x:1:1::{tmp_path}:/bin/bash\n")
    getent.chmod(0o755)
    return tmp_path


def bash(script: str, home: Path, **envs: str) -> "subprocess.CompletedProcess[str]":
    path = f"{home / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", script],
        cwd=home,
        env={"HOME": str(home), "PATH": path, **envs},
        capture_output=True,
        text=True,
    )


def ends(home: Path) -> float:
    return float((home / scripts.LEASE_ENDS).read_text().split()[0])


def test_the_setup_comes_first_and_does_not_change_the_server_s_shell(home: Path) -> None:
    setup = "set -euo pipefail\nLEFT=behind\ncd /\necho rank $SKYPILOT_SETUP_NODE_RANK"
    run = 'false; echo "${LEFT:-clean} in $(basename "$PWD") $-"'
    script = scripts.server(run, setup, hours_include_setup=False)
    done = bash(script, home, SKYPILOT_NODE_RANK="0", SKYPILOT_NODE_IPS="10.0.0.1")
    assert done.stdout.splitlines()[0] == "rank 0"
    assert done.stdout.splitlines()[1].startswith("clean in sky_workdir ")
    assert "e" not in done.stdout.split()[-1]  # `set -e` of the setup is off again


@pytest.mark.parametrize("setup", ["set -e\nfalse\ntrue", "exit 1"])
def test_a_setup_that_fails_is_reported_and_nothing_is_served(home: Path, setup: str) -> None:
    done = bash(scripts.server("echo served", setup, hours_include_setup=False), home)
    assert (done.returncode, done.stdout) == (1, "The setup failed with code 1\n")


@pytest.mark.parametrize("first", [False, True])
def test_a_setup_that_hangs_ends_with_the_lease(home: Path, first: bool) -> None:
    if first:
        script = scripts.setup_first("sleep 600")
    else:
        script = scripts.server("echo served", "sleep 600", hours_include_setup=False)
    done = bash(script, home, ART_MAX_HOURS=str(1 / 3600))
    assert done.returncode == 124 and "served" not in done.stdout
    assert "The setup took longer than the lease of" in done.stdout


def test_a_task_without_workdir_and_setup_serves_at_home(home: Path) -> None:
    (home / "sky_workdir").rmdir()
    done = bash(scripts.server("pwd", None, hours_include_setup=False), home)
    assert (done.stdout, done.stderr) == (f"{home}\n", "")


def test_the_lease_starts_with_the_server_unless_it_was_bought_with_dollars(home: Path) -> None:
    envs = {"ART_MAX_HOURS": "2"}
    now = time.time()
    run = "echo $ART_MAX_HOURS"
    script = scripts.server(run, "SECONDS=0", hours_include_setup=False)
    assert bash(script, home, **envs).stdout == "2\n"
    assert 7190 < ends(home) - now < 7290
    # As if the setup had taken an hour: it cost as much as an hour of the server.
    script = "SECONDS=3600\n" + scripts.server(run, "true", hours_include_setup=True)
    assert float(bash(script, home, **envs).stdout) == pytest.approx(1, abs=0.02)
    assert 3500 < ends(home) - now < 3690
    script = "SECONDS=9999\n" + scripts.server(run, "true", hours_include_setup=True)
    assert 0 < float(bash(script, home, **envs).stdout) < 0.01


@pytest.mark.parametrize("envs", [{}, {"ART_MAX_HOURS": ""}, {"ART_MAX_HOURS": "0"}], ids=str)
def test_without_a_lease_that_of_an_earlier_server_is_removed(
    home: Path, envs: dict[str, str]
) -> None:
    bash(scripts.server("true", None, hours_include_setup=False), home, ART_MAX_HOURS="0.5")
    assert 1700 < ends(home) - time.time() < 1810
    done = bash(scripts.server("true", None, hours_include_setup=False), home, **envs)
    assert (done.returncode, done.stderr) == (0, "")
    assert not (home / scripts.LEASE_ENDS).exists()


def test_the_line_that_activates_the_environment_is_added_to_bashrc_once(home: Path) -> None:
    script = scripts.server("true", None, hours_include_setup=False)
    bash(script, home)
    bash(script, home)
    assert (home / ".bashrc").read_text().count("\n") == 1


def test_a_run_records_its_exit_code_and_ends_with_the_lease(home: Path) -> None:
    done = bash(scripts.run("echo it\\'s; exit 7"), home, SKYPILOT_INTERNAL_JOB_ID="4")
    assert (done.returncode, done.stdout) == (7, "it's\n")
    assert (home / scripts.EXIT_CODES / "4").read_text() == "7\n"
    (home / scripts.LEASE_ENDS).write_text(f"{time.time() - 10:.0f}\n")
    done = bash(scripts.run("sleep 60"), home, SKYPILOT_INTERNAL_JOB_ID="5")
    assert done.returncode == 124


def test_a_run_is_on_the_first_machine_of_a_cluster_alone(home: Path) -> None:
    script = scripts.run("echo ran; exit 7")
    names = {"SKYPILOT_INTERNAL_JOB_ID": "4"}
    done = bash(script, home, **names, SKYPILOT_NODE_RANK="1")
    assert (done.returncode, done.stdout) == (0, "")
    assert not (home / scripts.EXIT_CODES / "4").exists()
    done = bash(script, home, **names, SKYPILOT_NODE_RANK="0")
    assert (done.returncode, done.stdout) == (7, "ran\n")


def test_a_stopped_server_is_ended_after_its_lease(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot notice by itself that its lease is over, and would keep the cluster up."""
    monkeypatch.setattr(scripts, "OVERTIME_S", 1)
    run = "trap 'echo asked; exit 3' TERM; kill -STOP $$; sleep 600"
    script = scripts.server(run, None, hours_include_setup=False)
    done = bash(script, home, ART_MAX_HOURS="0.0003")
    assert (done.returncode, done.stdout) == (124, "asked\n")


def test_functions_of_the_shell_reach_the_server(home: Path) -> None:
    script = "activate() { echo active; }\n"
    script += scripts.server("activate", None, hours_include_setup=False)
    assert bash(script, home).stdout == "active\n"


def test_a_cluster_waits_for_a_running_pull_but_not_for_ever(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep = home / "bin" / "sleep"  # counts the rounds, and writes the mark in the first four
    mark = home / "sky_workdir" / ".art" / "pulled"
    rounds = home / "rounds"
    sleep.write_text(
        f"#!/bin/bash\necho >>{rounds}\n"
        f'[ $(wc -l <{rounds}) -lt ${{PULL_ROUNDS}} ] || touch -d "-10 minutes" {mark}\n'
    )
    sleep.chmod(0o755)
    script = scripts.server("exit 5", None, hours_include_setup=False)
    for pull_rounds, expected in (("4", 4), ("9999", scripts.PULL_MAX_S // 5)):
        rounds.unlink(missing_ok=True)
        mark.parent.mkdir(exist_ok=True)
        mark.touch()
        assert bash(script, home, PULL_ROUNDS=pull_rounds).returncode == 5
        assert len(rounds.read_text().splitlines()) == expected
    rounds.unlink()
    for age in ("-10 minutes", "+10 days"):  # over, or the clock was set back
        subprocess.run(["touch", "-d", age, mark], check=True)
        assert bash(script, home, PULL_ROUNDS="9999").returncode == 5
        assert not rounds.exists()


@pytest.mark.parametrize("set_by", [-9_999_999, 9_999_999])
def test_a_changed_wall_clock_neither_ends_a_run_nor_lets_it_outlive_the_lease(
    home: Path, set_by: int
) -> None:
    """The file was written when the wall clock showed another time."""
    bash(scripts.server("true", None, hours_include_setup=False), home, ART_MAX_HOURS="0.5")
    words = (home / scripts.LEASE_ENDS).read_text().split()
    timeout = home / "bin" / "timeout"
    timeout.write_text("#!/bin/sh\necho $2\n")  # shows the seconds
    timeout.chmod(0o755)

    def left(*words: object) -> int:
        (home / scripts.LEASE_ENDS).write_text(" ".join(map(str, words)) + "\n")
        return int(bash(scripts.run("true"), home, SKYPILOT_INTERNAL_JOB_ID="1").stdout)

    wrong = int(words[0]) + set_by
    assert 1700 < left(wrong, *words[1:]) <= 1800
    # On another machine only the wall clock is known, but no run gets more than a whole lease.
    assert left(wrong, words[1], "other-boot", words[3]) == (1800 if set_by > 0 else 1)
