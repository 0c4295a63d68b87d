from pathlib import Path

import pytest

from launcher.errors import LauncherError
from launcher.lease import AUTOSTOP, Lease, describe_lease, hours_within
from launcher.settings import Settings
from launcher.task import Task


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A task with neither a lease nor an autostop."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.yaml").write_text("run: echo\nresources: {cpus: 2}\n")
    return tmp_path / "task.yaml"


def lease_of(task: Task) -> tuple[str, str]:
    return task.envs["ART_MAX_HOURS"], task.envs["ART_IDLE_MINUTES"]


def test_a_task_without_a_lease_gets_the_default_one_and_an_autostop(bare: Path) -> None:
    task = Task.load(bare, Settings())
    assert lease_of(task) == ("8", "30")
    assert task.config["resources"] == {"cpus": 2, "autostop": AUTOSTOP}


def test_a_flag_overrides_the_settings_which_override_the_task(bare: Path) -> None:
    bare.write_text("run: echo\nenvs: {ART_MAX_HOURS: 1, ART_IDLE_MINUTES: 2}\n")
    assert lease_of(Task.load(bare, Settings())) == ("1", "2")
    settings = Settings(max_hours=3, idle_minutes=4)
    assert lease_of(Task.load(bare, settings)) == ("3", "4")
    assert lease_of(Task.load(bare, settings, lease=Lease(max_hours=0.5))) == ("0.5", "4")


def test_an_autostop_in_the_task_is_kept(bare: Path) -> None:
    bare.write_text("run: echo\nresources: {any_of: [{cpus: 2, autostop: 10}]}\n")
    assert "autostop" not in Task.load(bare, Settings()).config["resources"]


def test_no_lease_is_announced_and_excludes_the_other_options(bare: Path) -> None:
    task = Task.load(bare, Settings(max_hours=3), lease=Lease(off=True))
    assert lease_of(task) == ("0", "0")
    assert describe_lease(task.envs, None).startswith("No lease: the cluster runs, and costs money")
    with pytest.raises(LauncherError, match="`--no-lease` cannot be combined with a lease"):
        Lease(max_cost=3, off=True)


def test_the_dollars_that_are_left_become_hours() -> None:
    assert hours_within(20, so_far=2, per_hour=3, hours=8) == 6
    assert hours_within(200, so_far=2, per_hour=3, hours=8) == 8
    assert hours_within(200, so_far=0, per_hour=2, hours=0) == 100
    with pytest.raises(LauncherError, match="has no price"):
        hours_within(20, so_far=0, per_hour=0, hours=8)
    with pytest.raises(LauncherError, match=r"cost \$2.00 before its server started"):
        hours_within(1, so_far=2, per_hour=3, hours=8)


def test_the_lease_is_described_in_words() -> None:
    envs = {"ART_MAX_HOURS": "8", "ART_IDLE_MINUTES": "30"}
    assert describe_lease(envs, 12.5).endswith(
        "after 30 idle minutes or after 8 hours or at $12.50"
    )
