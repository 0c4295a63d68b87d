"""Which files of a workdir go to a cluster."""

from pathlib import Path

import pytest

from launcher.errors import TaskError
from launcher.files import (
    copy_if_new,
    record_sent,
    refuse_unignored_env_file,
    removed_since,
    select,
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("a.py", "b.log", "data/c.bin", ".env", ".venv/x", ".art/y", "sub/.git/HEAD"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "sub" / "inner.py").write_text("")
    (tmp_path / ".gitignore").write_text("*.log\n")
    return tmp_path


def test_ignored_files_and_secrets_are_not_sent(tree: Path) -> None:
    assert select(tree) == [".gitignore", "a.py", "data/c.bin", "sub/inner.py"]


def test_skyignore_replaces_gitignore_as_with_sky_launch(tree: Path) -> None:
    (tree / ".skyignore").write_text("data\n")
    assert select(tree) == [".gitignore", ".skyignore", "a.py", "b.log", "sub/inner.py"]


@pytest.mark.parametrize(("file", "refused"), [(".gitignore", "*.log\n"), (".skyignore", "data\n")])
def test_an_env_file_that_skypilot_would_send_is_refused(
    tree: Path, file: str, refused: str
) -> None:
    (tree / ".gitignore").write_text(".env\n" if file == ".skyignore" else "")
    (tree / file).write_text(refused)
    with pytest.raises(TaskError, match="would go to the cluster") as error:
        refuse_unignored_env_file(str(tree))
    assert error.value.hint == f"Add a line `.env` to `{tree / file}`"
    (tree / file).write_text(f"{refused}.env\n")
    refuse_unignored_env_file(str(tree))
    (tree / file).unlink()
    (tree / ".env").unlink()
    refuse_unignored_env_file(str(tree))


def test_a_missing_workdir_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="There is no workdir"):
        select(tmp_path / "absent")


def test_only_files_sent_from_the_same_directory_count_as_removed(tmp_path: Path) -> None:
    record = tmp_path / "records" / "art.json"
    assert removed_since(record, tmp_path, ["a"]) == []
    record_sent(record, tmp_path, ["a", "b"])
    assert removed_since(record, tmp_path, ["a"]) == ["b"]
    assert removed_since(record, tmp_path / "other", ["a"]) == []
    (tmp_path / "b").write_text("ignored from now on")
    assert removed_since(record, tmp_path, ["a"]) == []


def test_a_file_of_the_same_size_and_time_is_not_copied_again(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one")
    assert copy_if_new(tmp_path / "a", tmp_path / "to" / "a")
    assert not copy_if_new(tmp_path / "a", tmp_path / "to" / "a")
