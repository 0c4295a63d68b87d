"""Bad input on the command line gives one sentence, a hint and an exit code; no traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import trainer.server.app
from trainer.cli import cli
from trainer.config import ServerConfig


def run(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trainer", *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def assert_reported(result: subprocess.CompletedProcess[str], message: str, code: int = 1) -> None:
    assert result.returncode == code, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr and result.stdout == ""
    if code == 1:
        first, _, hint = result.stderr.partition("\n\nhint: ")
        assert first.startswith("error: ") and hint.strip()


def test_every_fault_of_a_config_file_is_reported_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_text("prot: 7623\nlora:\n  rank: big\n")
    result = run("serve", "--config", "serve.yaml", cwd=tmp_path)
    assert_reported(result, "line 1: `prot` is not a setting, did you mean `port`?")
    assert "line 3: `lora.rank`" in result.stderr


@pytest.mark.parametrize("flag", ["--config", "--env-file"])
def test_a_missing_file_is_reported(tmp_path: Path, flag: str) -> None:
    assert_reported(run("serve", flag, "nope", cwd=tmp_path), "`nope`")


def test_a_wrong_type_on_the_command_line_is_a_usage_error(tmp_path: Path) -> None:
    assert_reported(run("serve", "--port", "many", cwd=tmp_path), "'many'", code=2)


def test_a_variable_of_the_wrong_type_is_reported(tmp_path: Path) -> None:
    result = run("serve", cwd=tmp_path, ART_MAX_HOURS="long")
    assert_reported(result, "`max_hours`")


@pytest.mark.parametrize("flag", ["--idle-minutes", "--exit-when-idle"])
def test_both_names_of_the_idle_flag_set_the_same_field(
    flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[ServerConfig] = []
    monkeypatch.setattr(trainer.server.app, "serve", served.append)
    monkeypatch.setenv("ART_IDLE_MINUTES", "9")
    cli.main(["serve", flag, "4"], standalone_mode=False)
    cli.main(["serve"], standalone_mode=False)
    assert [config.exit_when_idle for config in served] == [4, 9]


def test_both_names_of_the_idle_flag_together_are_rejected(tmp_path: Path) -> None:
    result = run("serve", "--idle-minutes", "4", "--exit-when-idle", "0", cwd=tmp_path)
    assert_reported(result, "`--exit-when-idle` is the older name of `--idle-minutes`", code=2)


def test_listening_on_a_public_address_requires_a_key(tmp_path: Path) -> None:
    result = run("serve", "--host", "0.0.0.0", cwd=tmp_path)
    assert_reported(result, "Refusing to listen on `0.0.0.0` without a key")
    result = run("serve", "--ray", "127.0.0.1:9", cwd=tmp_path)
    assert_reported(result, "Refusing to join the Ray cluster `127.0.0.1:9` without a key")


def test_a_missing_base_model_is_reported(tmp_path: Path) -> None:
    ports = ("--port", "0", "--openai-port", "0")
    result = run("serve", "--base-model", "./nope", *ports, cwd=tmp_path)
    assert result.returncode == 1
    assert "`./nope`" in result.stderr and "hint: " in result.stderr
    assert "Traceback" not in result.stderr


def test_a_missing_package_is_reported_with_the_install_command(tmp_path: Path) -> None:
    # Hide torch, as in an environment without the extras.
    code = (
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda n, *a: None if n == 'torch' else find(n, *a)\n"
        "sys.argv = ['trainer', 'serve']\n"
        "from trainer.cli import main; main()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert_reported(result, "This command needs `torch`, which is not installed")
    assert "scripts/install --only cluster" in result.stderr


def test_errors_have_no_colour_codes_outside_a_terminal(tmp_path: Path) -> None:
    result = run("serve", "--config", "nope", cwd=tmp_path)
    assert "\x1b[" not in result.stderr


def test_the_version_is_the_packages(tmp_path: Path) -> None:
    result = run("--version", cwd=tmp_path)
    assert result.stdout.startswith("trainer, version 0.")
