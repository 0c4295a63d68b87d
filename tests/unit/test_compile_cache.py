"""Compiled code outlives the process and, with a bucket, the machine."""

import tarfile
from pathlib import Path

import pytest

from kit.state_dir import COMPILED
from trainer.config import ServerConfig
from trainer.server.compile_cache import VARIABLES, CompileCache


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The first machine's home; the state directory is on all of them."""
    return new_machine(tmp_path, monkeypatch, "first")


def new_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> Path:
    monkeypatch.setenv("ART_CACHE", str(tmp_path / name))
    return tmp_path / name


def cache(tmp_path: Path, model: str = "model", bucket: str | None = "s3://state") -> CompileCache:
    return CompileCache(ServerConfig(state_dir=str(tmp_path / "state"), bucket=bucket), model)


def compile_something(cache: CompileCache, text: str = "code") -> Path:
    file = Path(cache.environment["VLLM_CACHE_ROOT"]) / "graphs" / "one.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_the_next_machine_starts_with_what_the_first_compiled(
    tmp_path: Path, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = cache(tmp_path)
    first.restore()  # there is nothing yet
    assert machine in compile_something(first).parents
    first.save()
    other = new_machine(tmp_path, monkeypatch, "second")
    second = cache(tmp_path)
    second.restore()
    found = Path(second.environment["VLLM_CACHE_ROOT"]) / "graphs" / "one.py"
    assert other in found.parents and found.read_text() == "code"
    (archive,) = (tmp_path / "state" / COMPILED).iterdir()
    before = archive.stat().st_ino
    second.save()  # nothing is new
    assert archive.stat().st_ino == before
    compile_something(second, "more code")
    second.save()
    assert archive.stat().st_ino != before
    cache(tmp_path, "another model").restore()
    assert len(list((other / "compiled").iterdir())) == 1


def test_a_machine_keeps_its_own_code_and_without_a_bucket_nothing_else(
    tmp_path: Path, machine: Path
) -> None:
    ours = cache(tmp_path, bucket=None)
    compile_something(ours)
    ours.save()
    assert not (tmp_path / "state").exists()
    kept = cache(tmp_path, bucket=None)
    kept.restore()
    assert kept.environment == ours.environment
    with_bucket = cache(tmp_path)
    with_bucket.save()
    compile_something(ours, "newer")
    with_bucket.restore()
    assert compile_something(ours, "newest").read_text() == "newest"


@pytest.mark.parametrize("content", [b"", b"not an archive", b"cut"])
def test_a_damaged_archive_is_not_used(
    tmp_path: Path, machine: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    first = cache(tmp_path)
    compile_something(first, str(list(range(20_000))))
    first.save()
    (archive,) = (tmp_path / "state" / COMPILED).iterdir()
    archive.write_bytes(archive.read_bytes()[:5000] if content == b"cut" else content)
    other = new_machine(tmp_path, monkeypatch, "second")
    second = cache(tmp_path)
    second.restore()
    assert not list((other / "compiled").iterdir())


def test_an_archive_cannot_write_elsewhere(tmp_path: Path, machine: Path) -> None:
    first = cache(tmp_path)
    victim = tmp_path / "victim"
    victim.write_text("mine")
    archive = first._archive
    assert archive
    archive.parent.mkdir(parents=True)
    with tarfile.open(archive, "w:gz") as made:
        made.add(victim, arcname="../../victim")
    first.restore()
    assert victim.read_text() == "mine" and not list((machine / "compiled").iterdir())


def test_what_the_user_has_set_is_left_alone(
    tmp_path: Path, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/somewhere")
    assert cache(tmp_path).environment.keys() == VARIABLES.keys() - {"VLLM_CACHE_ROOT"}
