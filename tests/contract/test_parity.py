"""Our model, its LoRA and its export compared with transformers and peft, in fp32 on CPU."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from trainer import checkpoint
from trainer.base_model.resolve import resolve
from trainer.base_model.smollm2 import NAME as SMOLLM2
from trainer.base_model.tokenizer import Tokenizer
from trainer.config import LoraConfig
from trainer.engines.decoder import Decoder
from trainer.export import Form, export
from trainer.learner.state import State
from trainer.policy.lora import lora_parameters
from trainer.policy.model import Policy, load_model

ROOT = Path(__file__).parents[2]
FAMILIES = [
    "llama2", "llama3", "llama3_1", "llama3_2", "llama_biases", "qwen2", "qwen3", "mistral",
]  # fmt: skip
MODELS = [*FAMILIES, "smollm2"]
LORA = LoraConfig(rank=4, alpha=8, seed=3)


def run_reference(command: str, directory: Path) -> None:
    python = subprocess.run(
        [ROOT / "scripts" / "parity"], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()
    subprocess.run(
        [python, Path(__file__).with_name("parity_reference.py"), command, directory],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"},
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, art_cache: str) -> dict[str, Path]:
    """The directory of each model. Those that transformers creates contain expected logits."""
    directory = tmp_path_factory.mktemp("models")
    # Tests are isolated per function, so a module's fixture must set the cache itself.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ART_CACHE", art_cache)
        smollm2 = resolve(SMOLLM2)
    (directory / "smollm2").mkdir()
    (directory / "smollm2" / "only_logits").write_text(str(smollm2))
    run_reference("models", directory)
    return {name: directory / name for name in FAMILIES} | {"smollm2": smollm2}


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> Path:
    return models["llama2"].parent


@pytest.fixture(scope="module")
def with_lora(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each model with a LoRA that changes it: our logits, peft's, and those of the export."""
    directory = tmp_path_factory.mktemp("loras")
    for name, base in models.items():
        policy = load(base, LORA)
        generator = torch.Generator().manual_seed(1)
        # Layers amplify rounding as well as the LoRA, so a deep model gets a smaller LoRA.
        size = 0.1 / policy.architecture.layers**0.5
        for parameter in lora_parameters(policy).values():
            parameter.data = torch.randn(parameter.shape, generator=generator) * size
        at = directory / name
        at.mkdir()
        saved = checkpoint.save(
            at,
            1,
            lambda path, policy=policy, base=base: State(policy, 0).write(
                path, base_model=str(base)
            ),
            {"base_model": str(base)},
        )
        given = tokens(policy.architecture.vocab_size)
        save_file({"tokens": given}, at / "tokens.bin")
        save_file({"logits": logits(policy, given)}, at / "ours.bin")
        (at / "adapter").symlink_to(saved)
        (at / "base").write_text(str(base))
        if not (base / "tokenizer.json").exists():
            (base / "tokenizer.json").write_text("{}")
        export(saved, at / "merged", form=Form(dtype="float32"))
    run_reference("adapters", directory)
    return directory


def load(directory: Path, lora: LoraConfig | None) -> Policy:
    return load_model(directory, lora=lora, dtype=torch.float32, device=torch.device("cpu"))


def tokens(vocabulary: int) -> torch.Tensor:
    return torch.arange(2 * 96).view(2, 96) * 7919 % vocabulary


@torch.no_grad()
def logits(policy: Policy, given: torch.Tensor) -> torch.Tensor:
    return policy.logits(policy.hidden(given)).contiguous()


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(
    name: str, models: dict[str, Path], expected: Path
) -> None:
    theirs = load_file(expected / name / "expected.bin")["logits"]
    policy = load(models[name], None)
    ours = logits(policy, tokens(policy.architecture.vocab_size))
    assert theirs.std() > 0.5
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_the_decoder_samples_from_the_logits_of_transformers(
    name: str, models: dict[str, Path], expected: Path
) -> None:
    theirs = load_file(expected / name / "expected.bin")["logits"]
    decoder = Decoder(load(models[name], None))
    given = tokens(decoder.architecture.vocab_size).tolist()
    cache = decoder.new_cache(2, 96)
    first = decoder.prefill([row[:90] for row in given], [0, 1], cache)
    assert (first - theirs[:, 89]).abs().max() < 1e-3
    for at in range(90, 96):
        found = decoder.decode([row[at] for row in given], [at, at], cache)
    assert (found - theirs[:, 95]).abs().max() < 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_peft_gives_the_same_logits_with_our_lora(
    name: str, models: dict[str, Path], with_lora: Path
) -> None:
    ours = load_file(with_lora / name / "ours.bin")["logits"]
    policy = load(models[name], None)
    without = logits(policy, tokens(policy.architecture.vocab_size))
    assert (ours - without).abs().max() > 0.1  # the LoRA does something
    theirs = load_file(with_lora / name / "found.bin")["adapter"]
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_transformers_gives_the_same_logits_with_the_merged_export(
    name: str, with_lora: Path
) -> None:
    ours = load_file(with_lora / name / "ours.bin")["logits"]
    theirs = load_file(with_lora / name / "found.bin")["merged"]
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)


def test_we_can_load_an_export(with_lora: Path) -> None:
    merged = with_lora / "qwen3" / "merged"
    assert json.loads((merged / "config.json").read_text())["torch_dtype"] == "float32"
    policy = load(merged, None)
    ours = load_file(with_lora / "qwen3" / "ours.bin")["logits"]
    theirs = logits(policy, tokens(policy.architecture.vocab_size))
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)


def test_smollm2_splits_digits_and_renders_its_own_template(models: dict[str, Path]) -> None:
    tokenizer = Tokenizer(models["smollm2"])
    words = [tokenizer.decode([one]) for one in tokenizer.encode("in 1492")]
    assert words == ["in", " ", "1", "4", "9", "2"]
    text = tokenizer.render([{"role": "user", "content": "Hi"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_ids == {2} and tokenizer.decode([2]) == "<|im_end|>"
