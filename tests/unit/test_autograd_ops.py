"""The hand-written backward passes compared with autograd on the plain formulas."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trainer.policy.autograd_ops import lora_linear, rms_norm, rotate, swiglu
from trainer.policy.cpu_attention import block_attention, plan_blocks


def plain_lora(x: Tensor, w: Tensor, bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return x @ w.t() + bias + 0.5 * (x @ a.t()) @ b.t()


def plain_norm(x: Tensor, scale: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * scale


def plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return gate * gate.sigmoid() * up


def plain_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


@pytest.mark.parametrize(
    ("ours", "plain", "shapes", "trained"),
    [
        (
            lambda *given: lora_linear(*given, 0.5),
            plain_lora,
            [(2, 5, 6), (7, 6), (7,), (3, 6), (7, 3)],
            [0, 3, 4],
        ),
        (lambda *given: rms_norm(*given, 1e-5), plain_norm, [(2, 5, 6), (6,)], [0, 1]),
        (swiglu, plain_swiglu, [(2, 5, 6), (2, 5, 6)], [0, 1]),
        (rotate, plain_rotate, [(2, 5, 3, 8), (2, 5, 1, 8), (2, 5, 1, 8)], [0]),
    ],
    ids=["lora_linear", "rms_norm", "swiglu", "rotate"],
)
def test_values_and_gradients_are_those_of_the_plain_formula(
    ours: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    shapes: list[tuple[int, ...]],
    trained: list[int],
) -> None:
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(shape, generator=generator) for shape in shapes]
    if plain is plain_rotate:  # a rotation has the same angle in both halves of a head
        angle = given[1][..., :4].repeat(1, 1, 1, 2)
        given[1], given[2] = angle.cos(), angle.sin()
    for index in trained:
        given[index].requires_grad_()
    wanted = [given[index] for index in trained]
    expected, found = plain(*given), ours(*given)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    slope = torch.randn(expected.shape, generator=generator)
    for mine, theirs in zip(
        torch.autograd.grad(found, wanted, slope),
        torch.autograd.grad(expected, wanted, slope),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kept", [0, 1 << 25])
@pytest.mark.parametrize("queries", [3, 8, 64])
def test_block_attention_is_masked_softmax_attention(
    kept: int, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.policy.cpu_attention.KEPT_CELLS", kept)
    monkeypatch.setattr("trainer.policy.cpu_attention.QUERIES", queries)
    generator = torch.Generator().manual_seed(0)
    # A prompt of 10, branches of 4, 5 and 3, the second with forks of 2 and 6; then another tree.
    lengths, parents = [10, 4, 5, 2, 6, 3, 7], [None, 0, 0, 2, 2, 0, None]
    above = torch.eye(7, dtype=torch.bool)
    for segment, parent in enumerate(parents):
        if parent is not None:
            above[segment] |= above[parent]
    owner = torch.arange(7).repeat_interleave(torch.tensor(lengths))
    mask = above[owner][:, owner].tril()
    q, k, v = (
        torch.randn(heads, 37, 8, generator=generator, requires_grad=True) for heads in (6, 2, 2)
    )
    scores = q @ k.repeat_interleave(3, dim=0).transpose(1, 2) / 8**0.5
    expected = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v.repeat_interleave(3, dim=0)
    found = block_attention(q, k, v, plan_blocks(mask, lengths))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    slope = torch.randn(expected.shape, generator=generator)
    for mine, theirs in zip(
        torch.autograd.grad(found, [q, k, v], slope),
        torch.autograd.grad(expected, [q, k, v], slope),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
