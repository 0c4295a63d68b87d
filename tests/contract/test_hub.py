"""`trainer export --push`, with the real `huggingface_hub` against a stand-in of the hub."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner

from kit.errors import KitError
from tests.contract.fake_hub import FakeHub
from trainer import checkpoint
from trainer.base_model.resolve import resolve
from trainer.cli import cli
from trainer.config import LoraConfig
from trainer.learner.state import State
from trainer.policy.model import load_model

# huggingface_hub hands httpx a file in the old way.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state directory with the model `demo/nice` at step 2, and its history."""
    run = tmp_path / ".art" / "demo" / "models" / "nice"
    lora = LoraConfig(rank=2, alpha=4)
    policy = load_model(
        resolve("tiny-random"), lora=lora, dtype=torch.float32, device=torch.device("cpu")
    )
    checkpoint.save(
        run / "checkpoints",
        2,
        lambda path: State(policy, 0).write(path, base_model="tiny-random"),
        {"base_model": "tiny-random", "parent": 1, "config": {"learning_rate": 0.001}},
    )
    rows = [{"step": step, "train/reward": step / 4} for step in (1, 2, 3)]
    (run / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / ".art"


def push(state: Path, repository: str, *arguments: str) -> Any:
    output = state.parent / "out"
    command = ["export", "nice@2", str(output), "--state-dir", str(state), "--push", repository]
    return CliRunner().invoke(cli, [*command, *arguments])


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    return monkeypatch


def test_a_pushed_model_has_a_card_with_plot_settings_and_provenance(
    state: Path, account: pytest.MonkeyPatch
) -> None:
    with FakeHub() as hub:
        account.setenv("HF_ENDPOINT", hub.address)
        done = push(state, "me/nice", "--gguf", "q8_0")
        assert done.exit_code == 0, done.exception
        assert f"{hub.address}/me/nice" in done.output
    assert hub.created[0]["visibility"] == "private"
    assert set(hub.files) == {
        *("README.md", "reward.png", "Modelfile", "out-Q8_0.gguf", "manifest.json")
    }
    assert hub.files["out-Q8_0.gguf"].startswith(b"GGUF")
    assert hub.files["reward.png"].startswith(b"\x89PNG")
    card = hub.files["README.md"].decode()
    about = yaml.safe_load(card.split("---")[1])
    assert about["license"] == "unknown" and {"grpo", "gguf"} <= set(about["tags"])
    manifest = checkpoint.verify(state / "demo/models/nice/checkpoints/0002")
    for text in (
        manifest["files"]["adapter_model.safetensors"]["sha256"],
        *("| Step | 2 |", "| Parent step | 1 |", "demo/nice", "art-cluster", '"learning_rate"'),
        *("![Rewards over training steps](reward.png)", "from 0.250 at step 1 to 0.500 at step 2"),
    ):
        assert text in card


def test_an_interrupted_push_continues_without_sending_files_again(
    state: Path, account: pytest.MonkeyPatch
) -> None:
    with FakeHub() as hub:
        account.setenv("HF_ENDPOINT", hub.address)
        hub.fail_commit = True
        failed = push(state, "me/nice", "--lora")
        assert isinstance(failed.exception, KitError) and "`500`" in failed.exception.message
        sent = hub.uploads
        hub.fail_commit = False
        assert push(state, "me/nice", "--lora").exit_code == 0
        assert hub.uploads == sent > 0
        assert "adapter_model.safetensors" in hub.files


def test_a_directory_of_something_else_is_not_pushed(
    state: Path, account: pytest.MonkeyPatch
) -> None:
    with FakeHub() as hub:
        account.setenv("HF_ENDPOINT", hub.address)
        assert push(state, "me/nice", "--lora").exit_code == 0
        refused = push(state, "me/nice", "--gguf", "f16")
    assert "already exists" in str(refused.exception)


@pytest.mark.parametrize(
    ("repository", "token", "refuse", "message"),
    [
        ("me/nice", None, None, "There is no token for the hub"),
        ("me/nice", "hf_wrong", None, "does not let this token write to `me/nice`"),
        ("them/nice", "hf_right", 403, "does not let this token write to `them/nice`"),
        ("a/b/c", "hf_right", None, "`a/b/c` is no name of a repository"),
        ("me/nice", "hf_right", 400, "You may not create this"),
    ],
)
def test_a_push_that_cannot_be_says_why_before_anything_is_written(
    repository: str,
    token: str | None,
    refuse: int | None,
    message: str,
    state: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with FakeHub(refuse=refuse) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        error = push(state, repository).exception
    assert isinstance(error, KitError), error
    assert message in error.message and error.hint
    assert not (state.parent / "out").exists()


def test_a_hub_that_is_gone_is_an_error_with_a_hint(
    state: Path, account: pytest.MonkeyPatch
) -> None:
    with FakeHub() as hub:
        address = hub.address
    account.setenv("HF_ENDPOINT", address)
    error = push(state, "me/nice").exception
    assert isinstance(error, KitError), error
    assert f"The hub `{address}` cannot be reached" in error.message and "HF_ENDPOINT" in error.hint


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gguf", "q4_k_m"], "GGUF of type `q4_k_m` cannot be written here"),
        (["--gguf", "q8_0", "--lora"], "A LoRA is not quantized to `q8_0`"),
        (["--gguf", "f16", "--dtype", "float16"], "`--dtype` is for a merged"),
    ],
)
def test_an_export_that_cannot_be_is_refused_by_name(
    arguments: list[str], message: str, state: Path
) -> None:
    output = state.parent / "out"
    command = ["export", "nice", str(output), "--state-dir", str(state), *arguments]
    error = CliRunner().invoke(cli, command).exception
    assert isinstance(error, KitError) and message in error.message and error.hint
    assert not output.exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nice@7", "has no checkpoint `7`"),
        ("other@2", "There is no checkpoint `other@2`"),
        ("nice@x", "has no checkpoint `x`"),
    ],
)
def test_a_checkpoint_that_is_not_there_is_named(name: str, message: str, state: Path) -> None:
    command = ["export", name, str(state.parent / "out"), "--state-dir", str(state)]
    error = CliRunner().invoke(cli, command).exception
    assert isinstance(error, KitError) and message in error.message
