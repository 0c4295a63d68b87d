"""Finding base models, and the errors for unsupported ones."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kit.manifest import sha256
from trainer.base_model import resolve as base_models
from trainer.base_model.architecture import parse_architecture
from trainer.base_model.precision import dtype_name
from trainer.base_model.resolve import resolve
from trainer.errors import ModelError


def test_tiny_random_is_the_same_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ART_CACHE", str(tmp_path / "cache"))
    directory = resolve("tiny-random")
    assert sha256(directory / "model.safetensors") == (
        "22e1442fc197fdb6b60954d53b17f7a6578e5b4cf1d29009f7149906e5267f42"
    )
    assert directory == resolve("tiny-random")
    assert list(directory.parent.glob(".*")) == []


def test_two_processes_may_create_a_model_at_once(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-c"),
        "from trainer.base_model.resolve import resolve; print(resolve('tiny-random'))",
    ]
    environment = {**os.environ, "ART_CACHE": str(tmp_path)}
    racers = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    found = [racer.communicate(timeout=60)[0].strip() for racer in racers]
    assert found[0] == found[1]
    assert [path.name for path in (tmp_path / "models").iterdir()] == [Path(found[0]).name]


def test_a_failed_creation_leaves_no_incomplete_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ART_CACHE", str(tmp_path))

    def fail(directory: Path) -> None:
        (directory / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(base_models.BUILT_IN, "tiny-random", fail)
    with pytest.raises(OSError):
        resolve("tiny-random")
    assert list((tmp_path / "models").iterdir()) == []


def test_a_directory_is_used_unchanged(tmp_path: Path) -> None:
    copy = shutil.copytree(resolve("tiny-random"), tmp_path / "mine")
    assert resolve(str(copy)) == copy


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere", "a/b/c"])
def test_a_missing_directory_is_an_error_that_names_it(name: str) -> None:
    with pytest.raises(ModelError, match=f"no model directory `{name}`"):
        resolve(name)


def test_without_a_hub_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="`some/model` cannot be downloaded") as caught:
        resolve("some/model")
    assert "Use a directory" in caught.value.hint


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_directory_with_a_missing_file_is_rejected(tmp_path: Path, name: str) -> None:
    copy = Path(shutil.copytree(resolve("tiny-random"), tmp_path / "mine"))
    (copy / name).unlink()
    with pytest.raises(ModelError, match=name.replace("model", r"\*?")):
        resolve(str(copy))


def config(**changes: Any) -> dict[str, Any]:
    path = resolve("tiny-random") / "config.json"
    return {**json.loads(path.read_text()), **changes}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}, "Gemma2ForCausalLM"),
        ({"model_type": "qwen3_moe", "architectures": None}, "qwen3_moe"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ],
)
def test_unsupported_settings_are_rejected_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named) as caught:
        parse_architecture(config(**changes))
    assert caught.value.hint.startswith("Supported: ")


def test_a_sliding_window_bounds_the_length() -> None:
    mistral = config(model_type="mistral", sliding_window=4096, max_position_embeddings=32768)
    assert parse_architecture(mistral).max_length == 4096


def test_a_gpu_computes_in_bf16_even_if_the_weights_are_fp32() -> None:
    stored_in_fp32 = resolve("tiny-random")
    assert dtype_name(stored_in_fp32, cuda=True) == "bfloat16"
    assert dtype_name(stored_in_fp32, cuda=False) == "float32"
