"""The decoder computes the same logits as the policy being trained."""

import pytest
import torch
from torch import Tensor

from trainer.base_model.resolve import resolve
from trainer.config import LoraConfig
from trainer.engines.decoder import Decoder, Product
from trainer.policy.model import Policy, load_lora, load_model, lora_state

CPU = torch.device("cpu")
SEQUENCES = torch.randint(260, (3, 20), generator=torch.Generator().manual_seed(0)).tolist()


def load(lora: LoraConfig, dtype: torch.dtype = torch.float32) -> Policy:
    """Load a policy whose LoRA is not zero."""
    policy = load_model(resolve("tiny-random"), lora=lora, dtype=dtype, device=CPU)
    torch.manual_seed(0)
    load_lora(
        policy, {name: torch.randn_like(one) * 0.05 for name, one in lora_state(policy).items()}
    )
    return policy


@torch.no_grad()
def expected(policy: Policy, *sequences: list[int]) -> Tensor:
    """Return the logits after each sequence from the forward pass that training uses."""
    return torch.stack([policy.logits(policy.hidden(torch.tensor([s])))[0, -1] for s in sequences])


def test_rows_that_join_and_leave_give_the_same_logits_as_alone() -> None:
    policy = load(LoraConfig())
    decoder = Decoder(policy)
    decoder.use_lora(policy.lora, lora_state(policy))
    cache = decoder.new_cache(4, 24)
    # Row 1 holds a prompt of 12 tokens, row 0 one of 5; then both decode together.
    a, b, c = SEQUENCES
    found = decoder.prefill([a[:12], b[:5]], [1, 0], cache)
    torch.testing.assert_close(found, expected(policy, a[:12], b[:5]), atol=1e-4, rtol=0)
    for turn in range(3):
        found = decoder.decode([b[5 + turn], a[12 + turn]], [5 + turn, 12 + turn], cache)
        alone = expected(policy, b[: 6 + turn], a[: 13 + turn])
        torch.testing.assert_close(found, alone, atol=1e-4, rtol=0)
    # Copy row 1 to rows 0 and 2; a new prompt overwrites the old one in row 1.
    cache.copy_row(1, [0, 2], 15)
    decoder.prefill([c[:7]], [1], cache)
    cache.resize(3, 48)
    found = decoder.decode([a[15], c[7], a[15]], [15, 7, 15], cache)
    alone = expected(policy, a[:16], c[:8], a[:16])
    torch.testing.assert_close(found, alone, atol=1e-4, rtol=0)


def test_a_lora_of_any_rank_and_targets_can_be_used_and_removed() -> None:
    lora = LoraConfig(rank=3, alpha=7, targets=("k_proj", "up_proj", "down_proj"))
    policy = load(lora)
    decoder = Decoder(policy)
    cache = decoder.new_cache(1, 24)
    decoder.use_lora(lora, lora_state(policy))
    torch.testing.assert_close(
        decoder.prefill(SEQUENCES[:1], [0], cache),
        expected(policy, SEQUENCES[0]),
        atol=1e-4,
        rtol=0,
    )
    decoder.use_lora(None, {})
    policy.set_lora_enabled(False)
    torch.testing.assert_close(
        decoder.prefill(SEQUENCES[:1], [0], cache),
        expected(policy, SEQUENCES[0]),
        atol=1e-4,
        rtol=0,
    )


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch, of a CPU without bf16
def test_bfloat16_differs_only_by_rounding() -> None:
    policy = load(LoraConfig(), torch.bfloat16)
    decoder = Decoder(policy)
    decoder.use_lora(policy.lora, lora_state(policy))
    found = decoder.prefill(SEQUENCES, [0, 1, 2], decoder.new_cache(3, 24))
    exact = expected(load(LoraConfig()), *SEQUENCES)
    assert (found - exact).abs().mean() < 2 * (expected(policy, *SEQUENCES) - exact).abs().mean()


def test_a_product_without_a_lora_holds_its_weights_once() -> None:
    """On a CPU they are packed, so the ones that were given would be a second copy."""
    product = Product({"layer": torch.ones(4, 4, dtype=torch.bfloat16)})
    halves = {f"layer.lora_{half}.weight": torch.ones(2, 4) for half in "AB"}
    halves["layer.lora_B.weight"] = torch.ones(4, 2)

    def held() -> int:
        return sum(isinstance(value, Tensor) for value in vars(product).values())

    assert held() == 1
    product.use_lora(LoraConfig(rank=2), halves)
    assert held() == 3
    product.use_lora(None, {})
    assert held() == 1
