"""Checkpoints appear complete or not at all, and a damaged one is never used."""

import errno
import logging
from pathlib import Path

import pytest

from kit.manifest import read_manifest
from trainer import checkpoint
from trainer.errors import CheckpointError, DiskFull, NotFound


def write(directory: Path) -> None:
    (directory / "adapter_model.safetensors").write_bytes(b"weights" * 100)


def save(checkpoints: Path, *steps: int) -> None:
    for step in steps:
        checkpoint.save(checkpoints, step, write, {"base_model": "tiny-random"})


def damage(checkpoints: Path, step: int) -> None:
    path = checkpoint.path_of(checkpoints, step) / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"X")


def test_a_checkpoint_has_a_manifest_with_its_step_and_sha256(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 7, write, {"parent": 6})
    assert path == tmp_path / "0007"
    manifest = checkpoint.verify(path)
    assert (manifest["step"], manifest["parent"]) == (7, 6)
    assert list(manifest["files"]) == ["adapter_model.safetensors"]
    assert [child.name for child in tmp_path.iterdir()] == ["0007"]


def test_syncing_a_deleted_checkpoint_does_nothing(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 7, write, {}, synced=False)
    checkpoint.sync(tmp_path / "0007")
    checkpoint.verify(tmp_path / "0007")
    checkpoint.sync(tmp_path / "0008")


def test_steps_are_listed_without_temporary_and_other_files(tmp_path: Path) -> None:
    assert checkpoint.list_steps(tmp_path / "none") == []
    assert checkpoint.latest(tmp_path / "none") is None
    save(tmp_path, 2, 0, 12345)
    (tmp_path / ".0003-abc").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "0004").write_text("a file")
    assert checkpoint.list_steps(tmp_path) == [0, 2, 12345]
    assert checkpoint.latest(tmp_path) == 12345


def test_a_damaged_checkpoint_is_logged_and_the_one_before_it_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 0, 1, 2)
    damage(tmp_path, 2)
    with caplog.at_level(logging.WARNING):
        assert checkpoint.latest(tmp_path) == 1
    assert "checkpoint 2 is damaged" in caplog.text
    assert checkpoint.list_steps(tmp_path) == [0, 1]
    with pytest.raises(CheckpointError, match=r"`.*0002` is damaged: .*does not match its sha256"):
        checkpoint.verify(checkpoint.path_of(tmp_path, 2))
    with pytest.raises(NotFound):
        checkpoint.verify(checkpoint.path_of(tmp_path, 9))


def test_only_a_damaged_checkpoint_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="already exists"):
        save(tmp_path, 1)
    damage(tmp_path, 1)
    save(tmp_path, 1)
    assert checkpoint.latest(tmp_path) == 1


def test_a_full_disk_keeps_earlier_steps(tmp_path: Path) -> None:
    save(tmp_path, 0)

    def fill(directory: Path) -> None:
        write(directory)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DiskFull, match="No space left on device"):
        checkpoint.save(tmp_path, 1, fill, {})
    assert [child.name for child in tmp_path.iterdir()] == ["0000"]


def test_unfinished_checkpoints_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    save(tmp_path, 0)
    (tmp_path / ".0001-k1ll3d").mkdir()
    checkpoint.clean(tmp_path)
    assert [child.name for child in tmp_path.iterdir()] == ["0000"]


def test_the_last_and_the_best_steps_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 0, 1, 2, 3, 4)
    steps = checkpoint.list_steps(tmp_path)
    keep = checkpoint.steps_to_keep(steps, last=2, metrics={0: 0.5, 1: 0.9, 2: 0.1}, best=1)
    assert keep == {1, 3, 4}
    assert checkpoint.steps_to_keep(steps, last=0) == {4}
    checkpoint.delete(tmp_path, set(steps) - keep)
    assert checkpoint.list_steps(tmp_path) == [1, 3, 4]


def test_a_run_can_be_forked_from_any_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "old", 3)
    source = checkpoint.path_of(tmp_path / "old", 3)
    assert checkpoint.fork(source, tmp_path / "new") == 3
    manifest = read_manifest(checkpoint.path_of(tmp_path / "new", 3))
    assert manifest is not None
    assert manifest["forked_from"] == str(source)
    assert manifest["base_model"] == "tiny-random"
    damage(tmp_path / "old", 3)
    with pytest.raises(CheckpointError):
        checkpoint.fork(source, tmp_path / "other")


def test_a_checkpoint_that_is_a_link_is_deleted_and_not_what_it_points_to(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "checkpoints" / "0001").mkdir(parents=True)
    elsewhere.mkdir()
    (elsewhere / "weights").write_text("kept")
    (tmp_path / "checkpoints" / "0002").symlink_to(elsewhere, target_is_directory=True)
    checkpoint.delete(tmp_path / "checkpoints", [2, 7])
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["0001"]
    assert (elsewhere / "weights").read_text() == "kept"
