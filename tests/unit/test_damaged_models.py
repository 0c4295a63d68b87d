"""A base model or a LoRA that is damaged in any way: one sentence that names the file."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from tests.contract.loras import write_lora
from trainer.base_model.architecture import parse_architecture, read_architecture
from trainer.base_model.resolve import resolve
from trainer.base_model.tokenizer import Tokenizer
from trainer.base_model.weight_files import expected_shapes
from trainer.errors import CheckpointError, ModelError, TrainerError, WorkerDied
from trainer.policy.lora import read_lora
from trainer.policy.model import assemble
from trainer.policy.weights import hugging_face_names
from trainer.processes.worker import Worker, cause

Damage = Callable[[Path], None]
WEIGHTS = "model.safetensors"
TEXTS = ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def noise(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 8)


def becomes(value: Any) -> Damage:
    return lambda path: path.write_text(json.dumps(value)) and None


def with_value(**changes: Any) -> Damage:
    def change(path: Path) -> None:
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def with_tensors(change: Callable[[dict[str, Any]], Any]) -> Damage:
    def damage(path: Path) -> None:
        tensors = {name: np.array(tensor) for name, tensor in load_file(path).items()}
        change(tensors)
        save_file(tensors, path)

    return damage


FIRST = "model.layers.0.mlp.up_proj.weight"
ODD = [None, "x", [], {}, -1, 0, 1.5, True, 10**30]
NUMBERS = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"]
CASES: list[tuple[str, Damage]] = [
    *((name, damage) for name in (*TEXTS, WEIGHTS) for damage in (cut, empty, zeros, noise)),
    *((name, becomes(value)) for name in TEXTS for value in (None, [], "text", 7)),
    *(("config.json", with_value(**{name: value})) for name in NUMBERS for value in ODD),
    *(("config.json", with_value(intermediate_size=value)) for value in ODD),
    *(("config.json", with_value(model_type=value)) for value in (*ODD, ["llama"])),
    *(("config.json", with_value(num_key_value_heads=value)) for value in ("x", 3, -1, 1.5)),
    *(("config.json", with_value(head_dim=value)) for value in ("x", 31, -2, [])),
    *(("config.json", with_value(max_position_embeddings=value)) for value in ("x", -1, [])),
    *(("config.json", with_value(rms_norm_eps=value)) for value in ("x", -1, [], 1e300)),
    *(("config.json", with_value(rope_theta=value)) for value in ("x", -1, [1])),
    *(
        ("config.json", with_value(rope_parameters=value))
        for value in (
            *("x", [1], 5),
            {"rope_type": "linear"},
            {"rope_type": "linear", "factor": "x"},
            {"rope_type": "llama3", "factor": 8},
            {"rope_type": ["linear"]},
            {"rope_theta": "x"},
        )
    ),
    *(("generation_config.json", with_value(eos_token_id=value)) for value in ("x", [1, "x"], -1)),
    *(("tokenizer_config.json", with_value(eos_token=value)) for value in (5, {"content": 5}, [1])),
    ("tokenizer.json", becomes({"model": {"type": "BPE", "vocab": {}, "merges": []}})),
    ("tokenizer.json", with_value(model={"type": "none"})),
    (WEIGHTS, with_tensors(lambda tensors: tensors.pop(FIRST))),
    (WEIGHTS, with_tensors(lambda tensors: tensors.update({FIRST: tensors[FIRST].T.copy()}))),
    (WEIGHTS, with_tensors(lambda tensors: tensors.update({FIRST: tensors[FIRST].astype("i4")}))),
    (WEIGHTS, with_tensors(lambda tensors: tensors.clear())),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without generated files: `ART_CACHE` is the session's, and it is copied for each test."""
    return Path(shutil.copytree(resolve("tiny-random"), tmp_path_factory.mktemp("m") / "model"))


@pytest.fixture
def model(tmp_path: Path, whole: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def load(directory: Path) -> None:
    """All that the server reads before it starts a worker."""
    resolve(str(directory))
    tokenizer = Tokenizer(directory)
    tokenizer.render([{"role": "user", "content": "q"}])
    assert tokenizer.longest_token and tokenizer.context


def test_the_whole_model_loads(model: Path) -> None:
    load(model)


def check(error: TrainerError, path: Path) -> None:
    assert f"`{path}`" in error.message or f"`{path.name}`" in error.message
    assert "\n" not in error.message and len(error.message) < 600 and error.hint


@pytest.mark.parametrize(("name", "damage"), CASES)
def test_a_damaged_file_is_named_in_one_sentence(name: str, damage: Damage, model: Path) -> None:
    damage(model / name)
    with pytest.raises(ModelError) as caught:
        load(model)
    check(caught.value, model / name)


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    "index",
    [
        *([], {}, {"weight_map": None}, {"weight_map": []}, {"weight_map": {}}),
        *({"weight_map": {FIRST: name}} for name in ("gone.safetensors", "../x", 5, "/etc/passwd")),
    ],
)
def test_a_bad_index_is_named(index: Any, model: Path) -> None:
    (model / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError) as caught:
        load(model)
    check(caught.value, model / INDEX)


@pytest.mark.parametrize("template", ["{% if", "{{ messages | nothing }}", 5, [5], {"a": 1}])
def test_a_bad_chat_template_is_an_error_with_a_sentence(template: Any, model: Path) -> None:
    with_value(chat_template=template)(model / "tokenizer_config.json")
    with pytest.raises(ModelError, match="chat template"):
        load(model)


@pytest.mark.parametrize("changes", [{}, {"model_type": "qwen2"}, {"model_type": "qwen3"}])
@pytest.mark.parametrize("tied", [True, False])
def test_the_expected_weights_are_those_of_the_policy(
    changes: dict[str, Any], tied: bool, whole: Path
) -> None:
    config = json.loads((whole / "config.json").read_text())
    architecture = parse_architecture({**config, **changes, "tie_word_embeddings": tied})
    for biased in (False, True):
        architecture = dataclasses.replace(architecture, output_bias=biased, mlp_bias=biased)
        with torch.device("meta"):
            policy = assemble(architecture, None)
        shapes = {
            theirs: tuple(policy.get_parameter(ours).shape)
            for ours, theirs in hugging_face_names(policy).items()
        }
        assert expected_shapes(architecture) == shapes


# LoRAs

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
LORA_CASES: list[tuple[str, Damage]] = [
    *((name, damage) for name in (ADAPTER, ADAPTER_CONFIG) for damage in (cut, empty, zeros)),
    *((name, Path.unlink) for name in (ADAPTER, ADAPTER_CONFIG)),
    *((ADAPTER_CONFIG, becomes(value)) for value in ([], 5, {}, {"r": 4})),
    *((ADAPTER_CONFIG, with_value(r=value)) for value in ("x", 0, None, 10**9)),
    *((ADAPTER_CONFIG, with_value(lora_alpha=value)) for value in ("x", -1)),
    *((ADAPTER_CONFIG, with_value(target_modules=value)) for value in (5, "all", ["nothing"])),
    (ADAPTER, with_tensors(lambda tensors: tensors.pop(A))),
    (ADAPTER, with_tensors(lambda tensors: tensors.update({A: tensors[A][:2].copy()}))),
    (ADAPTER, with_tensors(lambda tensors: tensors.update({A: tensors[A].astype("i4")}))),
    (ADAPTER, with_tensors(lambda tensors: tensors.update({"other": tensors[A]}))),
    (ADAPTER, with_tensors(lambda tensors: tensors.clear())),
]


@pytest.mark.parametrize(("name", "damage"), LORA_CASES)
def test_a_damaged_lora_is_named_in_one_sentence(
    name: str, damage: Damage, tmp_path: Path, whole: Path
) -> None:
    lora = write_lora(tmp_path / "lora", seed=1)
    architecture = read_architecture(whole)
    assert read_lora(lora, architecture)[0].rank == 4
    damage(lora / name)
    with pytest.raises(CheckpointError) as caught:
        read_lora(lora, architecture)
    check(caught.value, lora / name)


# Workers

FAILS = """
from trainer.errors import ModelError
from trainer.processes.worker import run_worker

def main():
    raise ModelError("`model.safetensors` is cut off", hint="Fetch the model again")

run_worker(main)
"""


async def test_a_worker_that_dies_at_its_start_is_quoted_with_its_error_not_its_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fails_worker.py").write_text(FAILS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    worker = Worker("engine", "fails_worker", [], log=tmp_path / "log")
    with pytest.raises(WorkerDied) as caught:
        await worker.start()
    await worker.stop()
    assert caught.value.message == (
        "The engine process ended with exit code `1`: `model.safetensors` is cut off"
    )
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_the_cause_is_read_from_the_newest_process_only(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("error: an old one\n")
    start = log.stat().st_size
    assert cause(log, start) == "its log is empty"
    with log.open("a") as file:
        file.write("Traceback (most recent call last):\nKeyError: 'x'\n\nhint: Fetch it again\n")
    assert cause(log, start) == "KeyError: 'x'"
    assert cause(tmp_path / "none") == "its log is empty"
