"""The policy: its LoRA, and its errors for weights that do not fit."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainer.base_model.resolve import resolve
from trainer.config import LoraConfig
from trainer.errors import CheckpointError, ModelError
from trainer.policy.lora import lora_parameters
from trainer.policy.model import Policy, init_lora, load_lora, load_model, lora_state, peft_config

CPU = torch.device("cpu")


def load(directory: Path | None = None, lora: LoraConfig | None = None) -> Policy:
    return load_model(
        directory or resolve("tiny-random"),
        lora=lora or LoraConfig(),
        dtype=torch.float32,
        device=CPU,
    )


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(260, (rows, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_a_fresh_lora_changes_nothing_and_a_trained_one_can_be_switched_off() -> None:
    policy, given = load(), tokens(1, 9)
    fresh = policy.hidden(given)
    policy.set_lora_enabled(False)
    base = policy.hidden(given)
    torch.testing.assert_close(fresh, base)
    policy.set_lora_enabled(True)
    load_lora(policy, {name: torch.randn_like(one) for name, one in lora_state(policy).items()})
    assert (policy.hidden(given) - base).abs().max() > 0.1
    policy.set_lora_enabled(False)
    assert torch.equal(policy.hidden(given), base)


def test_only_the_lora_is_trained_and_its_seed_decides_it() -> None:
    policy = load()
    trained = [name for name, one in policy.named_parameters() if one.requires_grad]
    assert trained and all(".lora_" in name for name in trained)
    assert policy.trainable().keys() == lora_parameters(policy).keys()
    first = {name: one.clone() for name, one in lora_state(policy).items()}
    init_lora(policy, seed=0)
    assert all(torch.equal(one, first[name]) for name, one in lora_state(policy).items())
    init_lora(policy, seed=1)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert not torch.equal(lora_state(policy)[name], first[name])


def test_targets_select_the_layers_that_get_a_lora() -> None:
    lora = LoraConfig(rank=3, targets=("q_proj", "down_proj"))
    state = lora_state(load(lora=lora))
    assert {name.split(".")[-3] for name in state} == {"q_proj", "down_proj"}
    assert {one.shape[0] for name, one in state.items() if "lora_A" in name} == {3}
    assert peft_config(lora, "tiny-random")["target_modules"] == ["q_proj", "down_proj"]


def test_a_lora_of_another_shape_is_rejected_with_its_first_misfit() -> None:
    policy = load()
    other = lora_state(load(lora=LoraConfig(rank=4)))
    with pytest.raises(CheckpointError, match=r"does not fit this model: `.*lora_A\.weight`"):
        load_lora(policy, other)


def test_weights_that_do_not_fit_their_config_are_rejected(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(resolve("tiny-random"), tmp_path / "model"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "intermediate_size": 256}))
    with pytest.raises(ModelError, match=r"has shape `\[512, 128\]`, not `\[256, 128\]`"):
        load(copy)
    (copy / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    with pytest.raises(ModelError, match=r"lack `model\.layers\.4"):
        load(copy)
    (copy / "model.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(ModelError, match="cannot be read"):
        load(copy)


@pytest.mark.parametrize("worker", ["trainer.engines.embedded_worker", "trainer.learner.worker"])
def test_a_worker_imports_no_data_sets_and_no_compilers(worker: str) -> None:
    heavy = ("pandas", "torchao", "torch._dynamo", "sympy", "torch.distributed.fsdp")
    code = f"""import importlib.util, sys, {worker}
print([name for name in {heavy} if name in sys.modules])
print(importlib.util.find_spec("torchao").origin.endswith("torchao/__init__.py"))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["[]", "True"], done.stderr


def test_only_one_module_imports_torchtune() -> None:
    package = Path(__file__).parents[2] / "trainer"
    importers = [
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r"^\s*(from|import) torchtune", path.read_text(), re.MULTILINE)
    ]
    assert importers == ["policy/model.py"]
