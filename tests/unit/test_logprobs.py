"""Logprobs of chosen tokens, in vocabulary chunks, compared with the full softmax."""

from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.policy import logprobs
from trainer.policy.logprobs import chosen_logprobs


@pytest.mark.parametrize("train_head", [False, True])
@pytest.mark.parametrize("vocabulary_chunk", [7, 50, 1000])
def test_values_and_gradients_are_those_of_log_softmax(
    train_head: bool, vocabulary_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(logprobs.CHUNKS, "cpu", (1024, vocabulary_chunk))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(23, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.randn(50, 16, generator=generator, dtype=torch.float64) * 3
    head.requires_grad_(train_head)
    targets = torch.randint(50, (23,), generator=generator)
    slopes = torch.randn(23, generator=generator)

    everything = (hidden @ head.t()).log_softmax(-1)
    expected = everything.gather(1, targets[:, None])[:, 0]
    wanted = [hidden, head] if train_head else [hidden]
    gradients = torch.autograd.grad((expected * slopes).sum(), wanted)

    found, entropies = chosen_logprobs(hidden, head, targets, chunk=10)
    torch.testing.assert_close(found, expected.float(), atol=1e-5, rtol=1e-5)
    entropy = -(everything.exp() * everything).sum(-1)
    torch.testing.assert_close(entropies, entropy.float(), atol=1e-5, rtol=1e-5)
    ours = torch.autograd.grad((found * slopes).sum(), wanted)
    for mine, theirs in zip(ours, gradients, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_logits_far_apart_neither_overflow_nor_lose_the_target() -> None:
    hidden = torch.tensor([[1.0]])
    head = torch.tensor([[1e4], [-1e4], [9.9e3]])
    found, entropies = chosen_logprobs(hidden, head, torch.tensor([2]))
    assert found.tolist() == [-100.0]
    assert entropies.item() == pytest.approx(0.0, abs=1e-2)


@pytest.mark.parametrize("scale", [0.3, 3.0, 8.0])
def test_a_head_in_fp8_changes_no_logprob_and_hardly_the_gradient(
    scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def product(x: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, _: Any) -> Tensor:
        return (x.float() * x_scales) @ (weight.float() * scales.t()).t()

    monkeypatch.setattr(logprobs, "scaled_product", product)  # for GPUs only
    monkeypatch.setitem(logprobs.CHUNKS, "cpu", (1024, 160))
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(400, 64, generator=generator)
    hidden = torch.randn(64, 64, generator=generator) * scale / 8
    targets = torch.randint(400, (64,), generator=generator)
    targets[::2] = (hidden @ head.t()).argmax(-1)[::2]  # half are likely words
    columns = logprobs.fp8_columns(head)
    assert columns and [len(scales[0]) for _, scales in columns] == [64, 64, 64]

    exact = hidden.double().requires_grad_()
    expected = (exact @ head.double().t()).log_softmax(-1).gather(1, targets[:, None])
    expected.sum().backward()
    gradients, values = [], []
    for fp8 in (None, columns):
        given = hidden.clone().requires_grad_()
        found, _ = chosen_logprobs(given, head, targets, fp8=fp8)
        found.sum().backward()
        values.append(found.detach())
        gradients.append(given.grad)
    assert values[0].equal(values[1])
    assert not gradients[0].equal(gradients[1])
    error = (gradients[1] - exact.grad).norm(dim=1) / exact.grad.norm(dim=1)
    # Where all but 1e-5 is certain, fp32 itself does not know the rest.
    known = (1 - expected.exp())[:, 0] > 1e-5
    assert known.sum() > 50 and error[known].mean() < 0.03 and error[known].max() < 0.06


def test_a_vocabulary_that_fp8_products_do_not_take_stays_as_it_is() -> None:
    assert logprobs.fp8_columns(torch.randn(50, 16)) is None
