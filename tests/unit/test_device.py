"""The memory limit of a process that belongs to cgroups."""

from pathlib import Path

from trainer.policy.device import _cgroup_limits


def test_the_limits_of_all_cgroups_of_a_process_count(tmp_path: Path) -> None:
    membership, root = tmp_path / "cgroup", tmp_path / "root"
    job = root / "slurm" / "job_7"
    job.mkdir(parents=True)
    (job / "memory.max").write_text("32000\n")
    (job.parent / "memory.max").write_text("max\n")
    (root / "memory.max").write_text("64000\n")
    membership.write_text("0::/slurm/job_7\n")
    assert sorted(_cgroup_limits(membership, root)) == [32_000, 64_000]


def test_limits_of_cgroups_v1_are_read(tmp_path: Path) -> None:
    membership, root = tmp_path / "cgroup", tmp_path / "root"
    (root / "memory" / "box").mkdir(parents=True)
    (root / "memory" / "box" / "memory.limit_in_bytes").write_text("5000\n")
    membership.write_text("4:cpu,cpuacct:/\n3:memory:/box\n1:name=systemd:/gone\n")
    assert list(_cgroup_limits(membership, root)) == [5000]


def test_a_process_without_cgroups_has_no_limits(tmp_path: Path) -> None:
    assert list(_cgroup_limits(tmp_path / "no", tmp_path)) == []
