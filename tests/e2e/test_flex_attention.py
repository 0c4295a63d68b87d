"""On a GPU, flex attention over a packed tree is masked softmax attention."""

import math
import random

import pytest
import torch

from trainer.learner.pack import Row, pack
from trainer.learner.prefix_tree import Sample
from trainer.policy.attention import attend


def tree(prompt: int, completion: int, count: int) -> Row:
    """A row with a forked prompt, one branch forked again, and a second tree."""
    draw = random.Random(0)

    def text(length: int) -> list[int]:
        return [draw.randrange(1000) for _ in range(length)]

    def sample(ids: list[int], chosen: int, group: int) -> Sample:
        mask = [at >= len(ids) - chosen for at in range(len(ids))]
        return Sample(ids, mask, [math.nan] * len(ids), 1.0, 1.0, group, 0)

    shared = text(prompt)
    branch = shared + text(completion)
    samples = [sample(shared + text(completion), completion, 0) for _ in range(count)]
    samples += [sample(branch + text(completion), completion, 0) for _ in range(2)]
    samples += [sample(text(prompt), 5, 1)]
    (row,) = pack(samples, length=4096)
    return row.to(torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_single_sequence_needs_no_mask() -> None:
    sample = Sample([7] * 45, [False] * 37 + [True] * 8, [0.0] * 45, 1.0, 1.0, 0, 0)
    (row,) = pack([sample], length=None)
    row = row.to(torch.device("cuda"))
    assert row.attention_mask() is None
    size = (len(row.tokens), 64)  # the last token of a sequence is only predicted
    given = [torch.randn(1, heads, *size, device="cuda") for heads in (8, 2, 2)]
    torch.testing.assert_close(
        attend(*given, None), attend(*given, row.mask()[None]), atol=5e-3, rtol=5e-3
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("prompt", "completion", "count"), [(300, 37, 5), (701, 64, 9)])
def test_flex_attention_is_masked_softmax_attention(
    prompt: int, completion: int, count: int
) -> None:
    row = tree(prompt, completion, count)
    generator = torch.Generator("cuda").manual_seed(0)
    given = [
        torch.randn(
            1, heads, len(row.tokens), 64, device="cuda", generator=generator, requires_grad=True
        )
        for heads in (8, 2, 2)
    ]
    slope = torch.randn(given[0].shape, device="cuda", generator=generator)
    expected = attend(*given, row.mask()[None])
    found = attend(*given, row.attention_mask())
    torch.testing.assert_close(found, expected, atol=5e-3, rtol=5e-3)
    for mine, theirs in zip(
        torch.autograd.grad(found, given, slope),
        torch.autograd.grad(expected, given, slope),
        strict=True,
    ):
        error = (mine - theirs).norm() / theirs.norm()
        assert error < 5e-3
