"""Compiled layers compute the same as plain ones (here on CPU)."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.base_model.resolve import resolve
from trainer.config import LoraConfig
from trainer.learner.gradient import row_logprobs
from trainer.learner.pack import Row, pack
from trainer.learner.prefix_tree import Sample
from trainer.policy import model
from trainer.policy.compiled import CompiledLayers
from trainer.policy.model import Policy, load_model, lora_state

# Tracing imports modules of torch that emit deprecation warnings.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def policy() -> Policy:
    directory: Path = resolve("tiny-random")
    # Layers with and without a LoRA share a joined product.
    lora = LoraConfig(targets=("q_proj", "v_proj", "up_proj", "down_proj"))
    policy = load_model(directory, lora=lora, dtype=torch.float32, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for tensor in lora_state(policy).values():
        tensor.normal_(std=0.05, generator=generator)
    return policy


@pytest.fixture
def row() -> Row:
    chance = random.Random(0)
    prompt = [chance.randrange(200) for _ in range(40)]
    samples = []
    for member in range(4):
        own = [chance.randrange(200) for _ in range(chance.randint(5, 30))]
        mask = [False] * len(prompt) + [True] * len(own)
        ids = prompt + own
        samples.append(Sample(ids, mask, [0.0] * len(ids), 1.0, 1.0, 0, member))
    (row,) = pack(samples, length=512)
    return row


@torch.no_grad()
def test_joined_and_padded_layers_give_the_same_logprobs(policy: Policy, row: Row) -> None:
    before = lora_state(policy).keys()
    plain, plain_entropies = row_logprobs(policy, row)
    policy.compiled = CompiledLayers(policy.layers, policy.architecture, backend="eager")
    compiled, entropies = row_logprobs(policy, row)
    torch.testing.assert_close(compiled, plain, atol=1e-4, rtol=0)
    torch.testing.assert_close(entropies, plain_entropies, atol=1e-4, rtol=0)
    assert lora_state(policy).keys() == before
    torch.testing.assert_close(row_logprobs(policy, row)[0], compiled)


def test_joined_and_padded_layers_give_the_same_gradients(policy: Policy, row: Row) -> None:
    plain = gradients(policy, row)
    policy.compiled = CompiledLayers(policy.layers, policy.architecture, backend="eager")
    for recompute in (False, True):
        policy.activation_checkpointing = recompute
        compiled = gradients(policy, row)
        assert compiled.keys() == plain.keys()
        for name, gradient in plain.items():
            torch.testing.assert_close(compiled[name], gradient, atol=1e-6, rtol=1e-3)


def gradients(policy: Policy, row: Row) -> dict[str, Tensor]:
    logprobs, _ = row_logprobs(policy, row)
    loss = (logprobs * torch.linspace(-1, 1, len(logprobs))).mean()
    trained = policy.trainable()
    found = torch.autograd.grad(loss, list(trained.values()))
    return dict(zip(trained, found, strict=True))


def test_layers_in_fp8_bring_a_head_in_fp8_for_gradients(
    policy: Policy, row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = torch.randn(32, 8)
    layers = CompiledLayers([], policy.architecture, fp8=True)
    with torch.no_grad():
        assert layers.head_columns(head) is None
    columns = layers.head_columns(head)
    assert columns and layers.head_columns(head) is columns
    assert CompiledLayers([], policy.architecture).head_columns(head) is None

    seen: list[Any] = []

    def logprobs(*given: Any, fp8: Any, **named: Any) -> tuple[Tensor, Tensor]:
        seen.append(fp8)
        return torch.zeros(1), torch.zeros(1)

    monkeypatch.setattr(model, "chosen_logprobs", logprobs)
    row_logprobs(policy, row)
    policy.compiled = CompiledLayers(policy.layers, policy.architecture, backend="eager")
    monkeypatch.setattr(policy.compiled, "head_columns", lambda head: columns)
    row_logprobs(policy, row)
    assert seen == [None, columns]
