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
from launcher.cluster import Cluster
from launcher.errors import RemoteError, Unreachable
from launcher.local.provider import LocalProvider
from launcher.testing import FakeProvider

CHECKPOINT = "demo/models/m/checkpoints/0001"
RECORD = "sky_workdir/.art/pulled"
Invoke = Callable[..., Result]


def write_checkpoint(place: str, weights: bytes, **manifest: Any) -> Path:
    """Write a checkpoint that an earlier pull may have left."""
    path = Path("checkpoints", place)
    path.mkdir(parents=True)
    (path / "adapter_model.safetensors").write_bytes(weights)
    write_manifest(path, manifest)
    return path


def test_pull_reports_which_checkpoints_are_new(invoke: Invoke, provider: FakeProvider) -> None:
    provider.checkpoints[CHECKPOINT] = b"lora"
    (first,) = json.loads(invoke("pull", "--json", provider=provider).stdout)
    assert (first["model"], first["step"], first["new"]) == ("m", 1, True)
    assert Path("checkpoints", CHECKPOINT, "adapter_model.safetensors").read_bytes() == b"lora"
    (second,) = json.loads(invoke("pull", "--json", provider=provider).stdout)
    assert not second["new"]


def test_up_from_a_pulled_checkpoint_sends_it_along_and_names_its_base_model(
    invoke: Invoke, healthy_port: int
) -> None:
    path = write_checkpoint(CHECKPOINT, b"lora", step=1, base_model="tiny-random")
    provider = FakeProvider(port=healthy_port)
    result = invoke("up", "task.yaml", "--from", str(path), provider=provider)
    assert result.exit_code == 0 and "`trainer chat m`" in result.stderr, result.stderr
    ((_, task, _),) = provider.launched
    place = f"~/.art-cluster/served/{CHECKPOINT}"
    assert task.envs["ART_CHECKPOINT"] == place and task.envs["BASE_MODEL"] == "tiny-random"
    assert task.config["file_mounts"] == {place: str(path.resolve())}
    again = invoke("up", "task.yaml", "--from", str(path), provider=provider)
    assert "not applied, because the cluster exists: `--from`" in again.stderr
    for arguments, message in (
        (("--from", "checkpoints"), "`checkpoints` is not a checkpoint"),
        (("--from", str(path), "--env", "BASE_MODEL=x"), "`--from` sets BASE_MODEL"),
        (("--from", str(path), "--for", "x"), "was trained from `tiny-random`"),
    ):
        refused = invoke("up", "-c", "other", "task.yaml", *arguments, provider=provider)
        assert refused.exit_code and message in refused.stderr
    (path / "adapter_model.safetensors").write_bytes(b"LORA")
    damaged = invoke("up", "-c", "other", "task.yaml", "--from", str(path), provider=provider)
    assert "adapter_model.safetensors` does not match its sha256" in damaged.stderr
    assert len(provider.launched) == 1


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
    assert provider.ended == [] and provider.files[RECORD] == ""
    assert invoke("down", "--yes", "--discard", provider=provider).exit_code == 0


def test_checkpoints_of_other_clusters_neither_stop_a_pull_nor_count_as_pulled(
    invoke: Invoke, provider: FakeProvider
) -> None:
    half = Path("checkpoints/other/models/m/checkpoints/0001")
    half.mkdir(parents=True)
    write_checkpoint(CHECKPOINT.replace("0001", "0002"), b"older", step=2)
    provider.checkpoints[CHECKPOINT] = b"lora"
    (pulled,) = json.loads(invoke("pull", "--json", provider=provider).stdout)
    assert (pulled["step"], pulled["new"]) == (1, True)
    assert provider.files[RECORD] == "demo/m/0001\n"
    assert invoke("down", "--yes", provider=provider).exit_code == 0


def test_a_checkpoint_of_an_earlier_run_is_not_overwritten(
    invoke: Invoke, provider: FakeProvider
) -> None:
    older = write_checkpoint(CHECKPOINT, b"older", step=1)
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
    assert provider.files[RECORD] == "demo/m/0001\n"


def test_a_pull_records_what_an_interrupted_pull_fetched(
    invoke: Invoke, provider: FakeProvider
) -> None:
    provider.checkpoints[CHECKPOINT] = b"lora"
    invoke("pull", provider=provider)
    provider.files.clear()  # as if it had stopped between the transfer and the record
    assert "0 new of 1 checkpoints" in invoke("pull", provider=provider).stderr
    assert provider.files[RECORD] == "demo/m/0001\n"


def test_a_checkpoint_that_the_server_deletes_during_a_pull_is_no_error(
    invoke: Invoke, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider.checkpoints = {CHECKPOINT: b"old", CHECKPOINT.replace("0001", "0002"): b"lora"}

    def fetch(*arguments: Any, **options: Any) -> None:
        FakeProvider.fetch(provider, *arguments, **options)
        provider.checkpoints.pop(CHECKPOINT, None)

    monkeypatch.setattr(provider, "fetch", fetch)
    assert "1 new of 1 checkpoints" in invoke("pull", provider=provider).stderr
    assert provider.files[RECORD] == "demo/m/0002\n"


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
    assert written == [{RECORD: kept[RECORD]}] and provider.files == kept


def test_metrics_of_an_earlier_run_are_kept_and_those_of_the_same_run_grow(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    provider = LocalProvider(tmp_path / "clusters")
    state = tmp_path / "clusters" / "art" / "home" / "sky_workdir" / ".art"
    files = ("mine/training_metrics.jsonl", "mine/reward_plot.png", "demo/models/m/history.jsonl")
    to = tmp_path / "here"

    def pull(text: str) -> dict[str, str]:
        """Pull files that hold `text`, and return everything that is here then."""
        for name in files:
            (state / name).parent.mkdir(parents=True, exist_ok=True)
            (state / name).write_text(text)
        Cluster("art", provider=provider).pull(to)
        assert (to / ".gitignore").read_text() == "*\n"  # no launch sends them back
        found = [path for path in to.rglob("[!.]*") if path.is_file()]
        return {str(path.relative_to(to)): path.read_text() for path in found}

    assert pull("1\n2") == dict.fromkeys(files, "1\n2")  # the second line is being written
    assert pull("1\n22\n3\n") == dict.fromkeys(files, "1\n22\n3\n")
    assert not caplog.records
    aside = ("mine/training_metrics.1.jsonl", "mine/reward_plot.1.png")
    aside += ("demo/models/m.1/history.jsonl",)
    other = dict.fromkeys(files, "other\n")
    assert pull("other\n") == other | dict.fromkeys(aside, "1\n22\n3\n")
    assert len(caplog.records) == 3 and "belongs to an earlier run" in caplog.text


def test_evaluations_of_this_machine_are_kept(tmp_path: Path) -> None:
    provider = LocalProvider(tmp_path / "clusters")
    state = tmp_path / "clusters" / "art" / "home" / "sky_workdir" / ".art"
    here, evals = tmp_path / "here", Path("demo/models/m/evals")
    for directory, text in ((state, "theirs\n"), (here, "ours\n")):
        (directory / evals).mkdir(parents=True)
        (directory / evals / "val.jsonl").write_text(text)
    Cluster("art", provider=provider).pull(here)
    assert (here / evals / "val.jsonl").read_text() == "theirs\n"
    assert (here / evals / "val.1.jsonl").read_text() == "ours\n"


def test_a_pull_brings_the_attempts_home_that_the_page_shows(tmp_path: Path) -> None:
    state = (
        tmp_path / "clusters" / "art" / "home" / "sky_workdir" / ".art" / "demo" / "models" / "m"
    )
    wanted = ("batches/0001.db", "batches/0001.val.db", "batches/groups.jsonl")
    wanted += ("trajectories/val/0001.jsonl", "history.jsonl")
    unfinished = ("batches/.0002.db.tmp", "batches/.0002.npz", "journal.0002.json")
    for name in wanted + unfinished:
        (state / name).parent.mkdir(parents=True, exist_ok=True)
        (state / name).write_text("x")
    Cluster("art", provider=LocalProvider(tmp_path / "clusters")).pull(tmp_path / "here")
    run = tmp_path / "here" / "demo" / "models" / "m"
    found = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    assert found == set(wanted)
