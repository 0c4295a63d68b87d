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
    return float((home / scripts.LEASE_ENDS).read_text())


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
    assert (home / ".bashrc").read_text().count("activate") == 2  # one line has it twice


def test_a_run_records_its_exit_code_and_ends_with_the_lease(home: Path) -> None:
    done = bash(scripts.run("echo it\\'s; exit 7"), home, SKYPILOT_INTERNAL_JOB_ID="4")
    assert (done.returncode, done.stdout) == (7, "it's\n")
    assert (home / scripts.EXIT_CODES / "4").read_text() == "7\n"
    (home / scripts.LEASE_ENDS).write_text(f"{time.time() - 10:.0f}\n")
    done = bash(scripts.run("sleep 60"), home, SKYPILOT_INTERNAL_JOB_ID="5")
    assert done.returncode == 124
