"""A checkpoint that is written as a model directory of Hugging Face's form."""

import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.contract.loras import write_lora
from trainer.base_model.architecture import read_architecture
from trainer.base_model.resolve import resolve
from trainer.export import gguf_files
from trainer.export.merge import Weight, copy_texts, merged, write_merged

QUERY = "model.layers.0.self_attn.q_proj"
Alive = list["weakref.ref[Tensor]"]


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    return write_lora(tmp_path / "lora", seed=0)


def test_a_lora_is_added_to_each_weight_that_has_one(tmp_path: Path, lora: Path) -> None:
    base = load_file(resolve("tiny-random") / "model.safetensors")
    trained = load_file(lora / "adapter_model.safetensors")
    low, high = (trained[f"base_model.model.{QUERY}.lora_{half}.weight"] for half in "AB")
    (output := tmp_path / "output").mkdir()
    write_merged(resolve("tiny-random"), lora, output, "float32")
    found = load_file(output / "model.safetensors")
    assert found.keys() == base.keys()
    expected = base[f"{QUERY}.weight"].float() + 8 / 4 * high @ low
    torch.testing.assert_close(found[f"{QUERY}.weight"], expected)
    norm = "model.norm.weight"
    torch.testing.assert_close(found[norm], base[norm].float())


def counting(weight: Weight, alive: Alive, most: list[int]) -> Callable[[], Tensor]:
    """A `read` that notes how many merged weights there are at once."""

    def read() -> Tensor:
        tensor = weight.read()
        alive.append(weakref.ref(tensor))
        most.append(sum(one() is not None for one in alive))
        return tensor

    return read


def test_weights_are_merged_as_they_are_written(tmp_path: Path, lora: Path) -> None:
    """All merged weights of a large model together, in fp32, would not fit the memory."""
    directory = resolve("tiny-random")
    alive: Alive = []
    most: list[int] = []
    weights = {
        name: Weight(weight.shape, counting(weight, alive, most))
        for name, weight in merged(directory, lora).items()
        if name.endswith("proj.weight")
    }
    count, architecture = len(weights), read_architecture(directory)
    file = tmp_path / "model.gguf"
    gguf_files.write_model(file, weights, architecture, directory, kind="bf16", name="m")
    assert len(most) == count > 2 and max(most) <= 2  # the one before it is freed after it


def test_every_chat_template_goes_with_a_model(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    names = ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"]
    for name in names:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    target.mkdir()
    copy_texts(source, target)
    assert [(target / name).read_text() for name in names] == names
