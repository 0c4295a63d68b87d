"""The other commands of the launcher, with a provider in memory."""

import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from launcher.provider import Cost
from launcher.settings import generate_key
from launcher.testing import FakeProvider

Invoke = Callable[..., Result]


def test_run_on_a_missing_cluster_prints_a_hint(invoke: Invoke) -> None:
    result = invoke("run", "-c", "nope", "true", provider=FakeProvider())
    assert result.exit_code == 1
    assert result.stderr.endswith("hint: List clusters with `launcher ls`\n")


def test_run_prints_its_id_and_passes_the_servers_addresses(
    invoke: Invoke, provider: FakeProvider
) -> None:
    result = invoke("run", "python", "train.py", "--steps", "3", provider=provider)
    assert (result.exit_code, result.stdout) == (0, "2\n")
    started = provider.started[0]
    assert str(started["command"]).endswith("\npython train.py --steps 3")
    assert started["envs"] == {
        "ART_BASE_URL": "http://127.0.0.1:7999",
        "OPENAI_BASE_URL": "http://127.0.0.1:8000/v1",
    }


def test_run_passes_the_address_of_langfuse(
    invoke: Invoke, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANGFUSE_HOST", "https://langfuse.example")
    assert invoke("run", "python", "train.py", provider=provider).exit_code == 0
    assert provider.started[0]["envs"]["LANGFUSE_HOST"] == "https://langfuse.example"  # type: ignore[index]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("python", "train.py", "-c", "prod", "--wait"), "python train.py -c prod --wait"),
        (("bash", "-c", "echo hi"), "bash -c 'echo hi'"),
        (("--", "--odd", "-h"), "--odd -h"),
        (("echo $HOME; ls",), "echo $HOME; ls"),
        (("A=1", "env"), "A=1 env"),
    ],
)
def test_run_leaves_the_options_of_the_command_alone(
    invoke: Invoke, provider: FakeProvider, words: tuple[str, ...], line: str
) -> None:
    result = invoke("run", "-c", "art", *words, provider=provider)
    assert (result.exit_code, result.stdout) == (0, "2\n")
    assert str(provider.started[0]["command"]).endswith(f"\n{line}")


def test_run_wait_exits_with_the_code_of_the_command(
    invoke: Invoke, provider: FakeProvider
) -> None:
    provider.code = 3
    result = invoke("run", "--wait", "false", provider=provider)
    assert (result.exit_code, result.stdout) == (3, "output of 2\n")


def test_logs_of_a_missing_run_name_it(invoke: Invoke, provider: FakeProvider) -> None:
    assert invoke("logs", provider=provider).stdout == "output of 1\n"
    result = invoke("logs", "7", provider=provider)
    assert result.exit_code == 1
    assert "Cluster `art` has no run `7`" in result.stderr


def test_ls_lists_clusters_or_the_runs_of_one(invoke: Invoke, provider: FakeProvider) -> None:
    clusters = json.loads(invoke("ls", "--json", provider=provider).stdout)
    assert clusters == [{"name": "art", "status": "up", "where": "nowhere"}]
    runs = json.loads(invoke("ls", "-c", "art", "--json", provider=provider).stdout)
    assert runs == [{"id": "1", "name": "demo", "status": "running"}]


def test_the_cluster_comes_from_the_flag_then_the_environment_then_the_env_file(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = FakeProvider()
    Path(".env").write_text("LAUNCHER_CLUSTER=from-file\n")
    invoke("down", "--yes", provider=provider)
    monkeypatch.setenv("LAUNCHER_CLUSTER", "from-environment")
    invoke("down", "--yes", provider=provider)
    invoke("down", "--yes", "-c", "from-flag", provider=provider)
    assert provider.ended == ["from-file", "from-environment", "from-flag"]


def test_a_bad_name_and_a_missing_env_file_are_refused(invoke: Invoke) -> None:
    result = invoke("down", "--yes", "-c", "no/slash", provider=FakeProvider())
    assert (result.exit_code, "`cluster`" in result.stderr) == (1, True)
    result = invoke("ls", "--env-file", "absent", provider=FakeProvider())
    assert "There is no env file `absent`" in result.stderr


def test_sync_lists_what_it_sends_and_warns_about_a_large_workdir(
    invoke: Invoke, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("big.bin").write_bytes(b"x" * 2000)
    monkeypatch.setattr("launcher.project.LARGE", 1000)
    result = invoke("sync", provider=provider)
    assert "goes to the cluster with 0 MB: `big.bin` 0 MB. Leave" in result.stderr
    assert "+ big.bin" in result.stderr and ".gitignore" in result.stderr
    Path("big.bin").unlink()
    sent = json.loads(invoke("sync", "--json", provider=provider).stdout)
    assert sent == {"files": [], "removed": ["big.bin"], "bytes": 0}


def test_cancel_stops_a_run_once(invoke: Invoke, provider: FakeProvider) -> None:
    assert "is cancelled" in invoke("cancel", "1", provider=provider).stderr
    assert "was already over" in invoke("cancel", "1", provider=provider).stderr
    assert "has no run `9`" in invoke("cancel", "9", provider=provider).stderr


def test_cost_is_projected_to_the_end_of_the_lease(
    invoke: Invoke, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert invoke("cost", provider=provider).stdout == (
        "it cost $1.50 in 0.5 hours, $3.00 an hour\n"
    )
    monkeypatch.setattr("time.time", lambda: 1000.0)
    provider.spent = Cost(1.5, 3.0, 0.5, 1000.0 + 7200)
    cost = json.loads(invoke("cost", "--json", provider=provider).stdout)
    assert (cost["so_far"], cost["projected"]) == (1.5, 7.5)
    assert invoke("cost", provider=provider).stdout.endswith("; $7.50 by the end of its lease\n")


def test_logs_of_the_server_and_its_processes(invoke: Invoke, provider: FakeProvider) -> None:
    invoke("run", "true", provider=provider)
    assert invoke("logs", provider=provider).stdout == "output of 2\n"
    assert invoke("logs", "server", provider=provider).stdout == "output of 1\n"
    learner = invoke("logs", "learner", provider=provider).stdout
    assert learner == "content of sky_workdir/.art/logs/learner.log\n"
    assert "engine.log" in invoke("logs", "vllm", provider=provider).stdout


def test_a_bundle_hides_secrets(
    invoke: Invoke, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "output")  # what the fake's runs write
    assert invoke("logs", "--bundle", "b.tar.gz", provider=provider).exit_code == 0
    with tarfile.open("b.tar.gz") as archive:
        (name,) = archive.getnames()
        file = archive.extractfile(name)
        assert file is not None and file.read() == b"[secret] of 1\n"
    assert name == "art/run-1-demo-running.log"


def test_a_bundle_hides_secrets_that_only_the_task_declares(
    invoke: Invoke, healthy_port: int
) -> None:
    Path("task.yaml").write_text("run: serve\nsecrets: {SEARCH_KEY: null, LONGER: null}\n")
    Path("this.env").write_text("SEARCH_KEY=put\nLONGER=output\n")
    given, provider = ["--env-file", "this.env"], FakeProvider(port=healthy_port)
    assert invoke("up", "task.yaml", *given, provider=provider).exit_code == 0
    assert invoke("logs", "--bundle", "b.tar.gz", *given, provider=provider).exit_code == 0
    with tarfile.open("b.tar.gz") as archive:
        file = archive.extractfile(archive.getnames()[0])
        assert file is not None and file.read() == b"[secret] of 1\n"
    kept = [path for path in Path.home().rglob("*") if path.is_file()]
    assert not [path for path in kept if b"output" in path.read_bytes()]


def test_a_bundle_hides_a_generated_key(
    invoke: Invoke, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"Bearer {generate_key()}, {generate_key()}\n"
    monkeypatch.setattr(provider, "logs", lambda *_, out, **__: out.write(text))
    assert invoke("logs", "--bundle", "b.tar.gz", provider=provider).exit_code == 0
    with tarfile.open("b.tar.gz") as archive:
        file = archive.extractfile(archive.getnames()[0])
        assert file is not None and file.read() == b"Bearer [secret], [secret]\n"


def test_doctor_finds_a_misspelt_variable_and_a_readable_env_file(
    invoke: Invoke, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    for program in ("rsync", "ssh"):  # the machine may have neither
        Path("bin").mkdir(exist_ok=True)
        Path("bin", program).write_text("#!/bin/sh\necho rsync  version 3.2.7\n")
        Path("bin", program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{Path('bin').resolve()}:{os.environ['PATH']}")
    assert invoke("doctor", provider=provider).exit_code == 0
    Path(".env").write_text("ART_MAX_HOUR=3\n")
    result = invoke("doctor", "--json", provider=provider)
    assert result.exit_code == 1
    (bad,) = [check for check in json.loads(result.stdout) if not check["ok"]]
    assert bad == {
        "name": ".env",
        "ok": False,
        "told": "`.env` sets `ART_MAX_HOUR`, which nothing reads",
        "fix": "Did you mean `ART_MAX_HOURS`?",
    }
    Path(".env").write_text("HF_TOKEN=x\n")
    Path(".env").chmod(0o644)
    assert "Run `chmod 600 .env`" in invoke("doctor", provider=provider).stdout
    Path(".env").chmod(0o600)
    assert "the server answers" in invoke("doctor", provider=provider).stdout
    provider.status = "init"
    output = invoke("doctor", provider=provider).stdout
    assert "`art` is init" in output and "launcher up -c art" in output


def test_run_tunnel_and_bundle_print_json(
    invoke: Invoke, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert json.loads(invoke("run", "--json", "true", provider=provider).stdout) == {
        "id": "2",
        "name": "run",
    }
    monkeypatch.setattr("launcher.endpoints.wait_while_healthy", lambda *_: None)
    address = f"http://127.0.0.1:{provider.port}"
    assert json.loads(invoke("tunnel", "--json", provider=provider).stdout) == {
        "control": address,
        "openai": f"{address}/v1",
        "page": f"{address}/",
        "dashboard": None,
        "variables": {"ART_BASE_URL": address, "OPENAI_BASE_URL": f"{address}/v1"},
    }
    printed = json.loads(invoke("logs", "--json", "--bundle", "b.tar.gz", provider=provider).stdout)
    assert printed["bundle"] == "b.tar.gz" and "art/run-1-demo-running.log" in printed["files"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("run", "--json", "--wait", "true"), "remove `--json`"),
        (("logs", "--json"), "`--json` works only with `--bundle`"),
        (("logs", "3", "--bundle", "b.tar.gz"), "remove `3`"),
    ],
)
def test_options_that_exclude_each_other_are_refused(
    invoke: Invoke, provider: FakeProvider, arguments: tuple[str, ...], why: str
) -> None:
    result = invoke(*arguments, provider=provider)
    assert result.exit_code == 2 and why in result.stderr
