"""Attention: every way to compute it gives the same."""

import torch

from trainer.policy.attention import attend, attend_causally


def test_a_gpus_attention_over_one_sequence_is_masked_softmax_attention() -> None:
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(1, heads, 45, 16, generator=generator) for heads in (8, 2, 2)]
    torch.testing.assert_close(attend_causally(*given), attend(*given, None))
