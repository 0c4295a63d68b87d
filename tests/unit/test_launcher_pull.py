"""`pull` and `down`: what is pulled, what is recorded as safe, and what a failed pull leaves."""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from kit.manifest import write_manifest
from launcher import checkpoints
from launcher.checkpoints import PulledCheckpoint
from launcher.errors import RemoteError, Unreachable
from launcher.testing import FakeProvider

CHECKPOINT = "demo/models/m/checkpoints/0001"
RECORD = "sky_workdir/.art/pulled"
Invoke = Callable[..., Result]


def test_pull_reports_which_checkpoints_are_new(invoke: Invoke, provider: FakeProvider) -> None:
    provider.checkpoints[CHECKPOINT] = b"lora"
    (first,) = json.loads(invoke("pull", "--json", provider=provider).stdout)
    assert (first["model"], first["step"], first["new"]) == ("m", 1, True)
    assert Path("checkpoints", CHECKPOINT, "adapter_model.safetensors").read_bytes() == b"lora"
    (second,) = json.loads(invoke("pull", "--json", provider=provider).stdout)
    assert not second["new"]


def test_pull_fetches_a_damaged_file_again(invoke: Invoke, provider: FakeProvider) -> None:
    provider.checkpoints[CHECKPOINT] = b"lora"
    invoke("pull", provider=provider)
    file = Path("checkpoints", CHECKPOINT, "adapter_model.safetensors")
    file.write_bytes(b"LORA")
    assert invoke("pull", provider=provider).exit_code == 0
    assert file.read_bytes() == b"lora"


def test_down_stops_at_a_damaged_checkpoint_and_names_the_file(
    invoke: Invoke, provider: FakeProvider
) -> None:
    provider.checkpoints[CHECKPOINT] = b"lora"
    provider.damaged.add(CHECKPOINT)
    result = invoke("down", "--yes", provider=provider)
    assert result.exit_code == 1
    assert f"`checkpoints/{CHECKPOINT}/adapter_model.safetensors` does not match" in result.stderr
    assert "or discard them with `launcher down -c art --discard`" in result.stderr
    assert provider.ended == [] and provider.files == {}
    assert invoke("down", "--yes", "--discard", provider=provider).exit_code == 0


def test_checkpoints_of_other_clusters_neither_stop_a_pull_nor_count_as_pulled(
    invoke: Invoke, provider: FakeProvider
) -> None:
    half = Path("checkpoints/other/models/m/checkpoints/0001")
    half.mkdir(parents=True)
    older = Path("checkpoints", CHECKPOINT).with_name("0002")
    older.mkdir(parents=True)
    (older / "adapter_model.safetensors").write_bytes(b"older")
    write_manifest(older, {"step": 2})
    provider.checkpoints[CHECKPOINT] = b"lora"
    (pulled,) = json.loads(invoke("pull", "--json", provider=provider).stdout)
    assert (pulled["step"], pulled["new"]) == (1, True)
    assert provider.files == {RECORD: "demo/m/0001\n"}
    assert invoke("down", "--yes", provider=provider).exit_code == 0


def test_a_checkpoint_of_an_earlier_run_is_not_overwritten(
    invoke: Invoke, provider: FakeProvider
) -> None:
    older = Path("checkpoints", CHECKPOINT)
    older.mkdir(parents=True)
    (older / "adapter_model.safetensors").write_bytes(b"older")
    write_manifest(older, {"step": 1})
    provider.checkpoints = {CHECKPOINT: b"lora", CHECKPOINT.replace("0001", "0002"): b"next"}
    for verb in (["pull"], ["down", "--yes"]):
        assert invoke(*verb, provider=provider).exit_code == 0
    aside = older.parents[1].with_name("m.1")
    assert (aside / "checkpoints" / "0001" / "adapter_model.safetensors").read_bytes() == b"older"
    assert (older / "adapter_model.safetensors").read_bytes() == b"lora"
    assert not older.parents[1].with_name("m.2").exists() and provider.ended == ["art"]


def test_down_pulls_first_and_is_safe_to_repeat(invoke: Invoke, provider: FakeProvider) -> None:
    provider.checkpoints[CHECKPOINT] = b"lora"
    result = invoke("down", "--yes", "--to", "home", provider=provider)
    assert result.exit_code == 0
    assert Path("home", CHECKPOINT).is_dir()
    assert invoke("down", "--yes", provider=provider).exit_code == 0
    assert provider.ended == ["art", "art"]


def test_down_asks_for_confirmation(invoke: Invoke, provider: FakeProvider) -> None:
    assert invoke("down", provider=provider).exit_code == 1  # stdin is empty: not confirmed
    assert provider.ended == []


def test_down_shows_the_cost(invoke: Invoke, provider: FakeProvider) -> None:
    assert "is gone; it cost $1.50" in invoke("down", "--yes", provider=provider).stderr
    printed = json.loads(invoke("down", "--yes", "--json", provider=provider).stdout)
    assert printed == {"pulled": [], "cost": None}


def test_down_pulls_nothing_from_a_cluster_that_was_never_up(
    invoke: Invoke, provider: FakeProvider
) -> None:
    provider.status = "init"
    provider.breaks = [AssertionError("nothing to fetch from")]
    assert invoke("down", "--yes", provider=provider).exit_code == 0
    assert provider.ended == ["art"]


@pytest.mark.parametrize("status", ["up", "unhealthy", "stopped"])
def test_down_keeps_a_cluster_whose_checkpoints_it_cannot_reach(
    invoke: Invoke, provider: FakeProvider, status: str
) -> None:
    provider.status = status
    provider.breaks = [RemoteError("The transfer broke off", hint="Run it again")]
    result = invoke("down", "--yes", provider=provider)
    assert (result.exit_code, provider.ended) == (1, [])
    assert "hint: Run it again; or discard them with `launcher down -c art --discard`" in (
        result.stderr
    )
    assert invoke("down", "--yes", provider=provider).exit_code == 0


def test_a_full_disk_is_reported_and_the_next_pull_succeeds(
    invoke: Invoke, provider: FakeProvider
) -> None:
    provider.checkpoints[CHECKPOINT] = b"lora"
    provider.breaks = [OSError(errno.ENOSPC, "No space left on device")]
    result = invoke("pull", provider=provider)
    assert result.exit_code == 1
    assert "error: `checkpoints` cannot be written: No space left on device" in result.stderr
    assert "hint: Free some space" in result.stderr
    assert "1 new of 1 checkpoints" in invoke("pull", provider=provider).stderr


def test_a_pull_records_on_the_cluster_what_is_safe(invoke: Invoke, provider: FakeProvider) -> None:
    provider.checkpoints[CHECKPOINT] = b"lora"
    invoke("pull", provider=provider)
    assert provider.files == {RECORD: "demo/m/0001\n"}


def test_a_pull_records_what_an_interrupted_pull_fetched(
    invoke: Invoke, provider: FakeProvider
) -> None:
    provider.checkpoints[CHECKPOINT] = b"lora"
    invoke("pull", provider=provider)
    provider.files.clear()  # as if it had stopped between the transfer and the record
    assert "0 new of 1 checkpoints" in invoke("pull", provider=provider).stderr
    assert provider.files == {RECORD: "demo/m/0001\n"}


def test_a_checkpoint_that_the_server_deletes_during_a_pull_is_no_error(
    invoke: Invoke, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider.checkpoints = {CHECKPOINT: b"old", CHECKPOINT.replace("0001", "0002"): b"lora"}

    def fetch(*arguments: Any, **options: Any) -> None:
        FakeProvider.fetch(provider, *arguments, **options)
        provider.checkpoints.pop(CHECKPOINT, None)

    monkeypatch.setattr(provider, "fetch", fetch)
    assert "1 new of 1 checkpoints" in invoke("pull", provider=provider).stderr
    assert provider.files == {RECORD: "demo/m/0002\n"}


def test_watch_pulls_until_the_newest_run_is_over(invoke: Invoke, provider: FakeProvider) -> None:
    invoke("run", "true", provider=provider)  # over at once
    provider.checkpoints[CHECKPOINT] = b"lora"
    result = invoke("pull", "--watch", "--every", "0", provider=provider)
    assert result.exit_code == 0
    assert "1 new of 1 checkpoints" in result.stderr


def test_a_watch_retries_failures_after_its_first_pull() -> None:
    found = [PulledCheckpoint("demo", "m", 1, Path("0001"), 4, new=True)]
    script: list[Any] = [found, Unreachable("ssh broke off"), RemoteError("rsync failed"), found]

    def pull() -> list[PulledCheckpoint]:
        if isinstance(script[0], Exception):
            raise script.pop(0)
        return list(script.pop(0))

    assert list(checkpoints.watch(lambda: len(script) == 1, pull, 0)) == [found, found]
    script = [Unreachable("never there")]
    with pytest.raises(Unreachable, match="never there"):
        list(checkpoints.watch(lambda: False, pull, 0))


def test_down_pulls_checkpoints_that_were_finished_during_its_pull(
    invoke: Invoke, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider.checkpoints[CHECKPOINT] = b"lora"
    second = CHECKPOINT.replace("0001", "0002")

    def fetch(*arguments: Any, **options: Any) -> None:
        FakeProvider.fetch(provider, *arguments, **options)
        if Path("checkpoints", CHECKPOINT).is_dir():  # only once the pull has begun
            provider.checkpoints[second] = b"later"

    monkeypatch.setattr(provider, "fetch", fetch)
    result = invoke("down", "--yes", provider=provider)
    assert result.exit_code == 0 and "2 new of 2 checkpoints" in result.stderr
    assert Path("checkpoints", second, "adapter_model.safetensors").read_bytes() == b"later"


def test_a_long_pull_rewrites_its_record_so_that_the_server_does_not_go_idle(
    invoke: Invoke, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider.checkpoints[CHECKPOINT] = b"lora"
    invoke("pull", provider=provider)
    kept = dict(provider.files)
    written: list[dict[str, str]] = []
    monkeypatch.setattr(checkpoints, "TOUCH_INTERVAL", 0.0)

    class Recorder(dict[str, str]):
        def update(self, new: Any) -> None:  # type: ignore[override]
            written.append(new)

    provider.files = Recorder(kept)
    assert "0 new of 1 checkpoints" in invoke("pull", provider=provider).stderr
    assert written == [kept] and provider.files == kept
