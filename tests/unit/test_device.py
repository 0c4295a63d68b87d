"""How much memory a process may take, where a group of processes has a limit of its own."""

from pathlib import Path

from trainer.policy.device import _cgroup_limits


def test_the_limits_of_all_groups_a_process_is_in_count(tmp_path: Path) -> None:
    told, root = tmp_path / "told", tmp_path / "root"
    job = root / "slurm" / "job_7"
    job.mkdir(parents=True)
    (job / "memory.max").write_text("32000\n")
    (job.parent / "memory.max").write_text("max\n")
    (root / "memory.max").write_text("64000\n")
    told.write_text("0::/slurm/job_7\n")
    assert sorted(_cgroup_limits(told, root)) == [32_000, 64_000]


def test_the_first_version_of_cgroups_is_understood(tmp_path: Path) -> None:
    told, root = tmp_path / "told", tmp_path / "root"
    (root / "memory" / "box").mkdir(parents=True)
    (root / "memory" / "box" / "memory.limit_in_bytes").write_text("5000\n")
    told.write_text("4:cpu,cpuacct:/\n3:memory:/box\n1:name=systemd:/gone\n")
    assert list(_cgroup_limits(told, root)) == [5000]


def test_where_there_are_none_nothing_is_said(tmp_path: Path) -> None:
    assert list(_cgroup_limits(tmp_path / "no", tmp_path)) == []
