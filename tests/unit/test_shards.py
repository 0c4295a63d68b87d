"""Which rows of which tensors a process reads into its shards, and in which form."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from trainer.base_model.architecture import read_architecture
from trainer.base_model.resolve import resolve
from trainer.base_model.weight_files import INDEX, expected_shapes
from trainer.errors import ModelError
from trainer.learner.state import form_of_shards
from trainer.policy.shards import fill, locate, sources

WEIGHTS = "model.safetensors"


@pytest.mark.parametrize(
    ("device", "processes", "form"),
    [("cpu", 1, None), ("cuda", 1, None), ("cpu", 2, "plain"), ("cuda", 2, "compiled")],
)
def test_several_processes_load_shards_for_the_layers_that_they_run(
    device: str, processes: int, form: str | None
) -> None:
    assert form_of_shards(torch.device(device), processes) == form


def test_a_joined_parameter_holds_the_rows_of_several_tensors() -> None:
    at = "model.layers.7"
    assert sources("layers.7.attn.q_proj.joined_bias") == [
        f"{at}.self_attn.{one}_proj.bias" for one in "qkv"
    ]
    assert sources("layers.7.mlp.w1.joined_weight") == [
        f"{at}.mlp.{one}_proj.weight" for one in ("gate", "up")
    ]
    assert sources("layers.7.attn.output_proj.weight") == [f"{at}.self_attn.o_proj.weight"]
    assert sources("tok_embeddings.weight") == ["model.embed_tokens.weight"]


@pytest.mark.parametrize("start", range(7))
@pytest.mark.parametrize("count", range(4))
def test_rows_are_read_across_the_ends_of_tensors(tmp_path: Path, start: int, count: int) -> None:
    whole = torch.arange(14.0).view(7, 2)
    parts = whole.split([3, 1, 3])
    weights = []
    for number, part in enumerate(parts):
        path = tmp_path / f"{number}.safetensors"
        save_file({f"tensor {number}": part.clone()}, path)
        weights.append((path, f"tensor {number}", len(part)))
    rows = torch.zeros(min(count, 7 - start), 2, dtype=torch.bfloat16)
    fill(rows, start, weights)
    assert torch.equal(rows.float(), whole[start : start + count])


def test_weights_are_found_in_several_files(tmp_path: Path) -> None:
    model, shapes = copied(tmp_path)
    tensors = load_file(model / WEIGHTS)
    (model / WEIGHTS).unlink()
    places = {name: f"{number % 3}.safetensors" for number, name in enumerate(tensors)}
    for file in set(places.values()):
        mine = {name: one for name, one in tensors.items() if places[name] == file}
        save_file(mine, model / file)
    (model / INDEX).write_text(json.dumps({"weight_map": places}))
    assert locate(model, shapes) == {name: model / file for name, file in places.items()}


def cut(tensors: dict[str, torch.Tensor], path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def lack(tensors: dict[str, torch.Tensor], path: Path) -> None:
    del tensors["model.norm.weight"]
    save_file(tensors, path)


def shorten(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file({**tensors, "model.norm.weight": torch.ones(5)}, path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "cannot be read"),
        (lack, "lack `model.norm.weight`"),
        (shorten, r"`model.norm.weight` has shape `\[5\]`, not `\[128\]`"),
    ],
)
def test_damaged_weights_are_refused_before_any_memory_is_taken(
    tmp_path: Path, damage: Callable[[dict[str, torch.Tensor], Path], None], message: str
) -> None:
    model, shapes = copied(tmp_path)
    damage(load_file(model / WEIGHTS), model / WEIGHTS)
    with pytest.raises(ModelError, match=message):
        locate(model, shapes)


def copied(tmp_path: Path) -> tuple[Path, dict[str, tuple[int, ...]]]:
    model = Path(shutil.copytree(resolve("tiny-random"), tmp_path / "model"))
    return model, expected_shapes(read_architecture(model))
