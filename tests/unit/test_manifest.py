from pathlib import Path

from kit.manifest import damage, read_manifest, write_manifest


def checkpoint(directory: Path) -> Path:
    (directory / "weights").write_bytes(b"12345")
    (directory / "config").write_text("{}")
    write_manifest(directory, {"step": 3})
    return directory


def test_an_unchanged_directory_has_no_damage(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path)
    assert damage(directory) == []
    manifest = read_manifest(directory)
    assert manifest and manifest["step"] == 3 and set(manifest["files"]) == {"weights", "config"}


def test_a_changed_byte_and_a_missing_file_are_named(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path)
    (directory / "weights").write_bytes(b"12346")
    (directory / "config").unlink()
    assert damage(directory) == [
        f"`{directory / 'config'}` is missing",
        f"`{directory / 'weights'}` does not match its sha256",
    ]


def test_a_directory_without_a_manifest_is_damaged(tmp_path: Path) -> None:
    assert damage(tmp_path) == [f"`{tmp_path}` has no readable `manifest.json`"]
