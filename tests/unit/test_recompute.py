"""Layers are recomputed only if memory requires it, the cheapest parts first."""

from trainer.base_model.architecture import parse_architecture
from trainer.policy.recompute import FASTEST, LEAN, plan

SEVEN_B = parse_architecture(
    {
        "model_type": "qwen2",
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    }
)
GIB = 2**30


def test_less_memory_recomputes_more_layers_up_to_all() -> None:
    plans = [plan(SEVEN_B, 8192, free * GIB) for free in (80, 40, 28, 20, 10, 2)]
    assert plans[0] == FASTEST
    assert plans[2].budget == LEAN and plans[2].recomputed == 0
    recomputed = [plan.recomputed for plan in plans]
    assert recomputed == sorted(recomputed) and recomputed[-1] == SEVEN_B.layers


def test_computed_sizes_match_the_memory_measured_on_a_gpu() -> None:
    # On an H200: 49.3 GiB with the fastest plan and 38.4 GiB with the lean one, 14.2 of it weights.
    assert plan(SEVEN_B, 8192, int(38.5 * GIB)) == FASTEST
    assert plan(SEVEN_B, 8192, int(34.0 * GIB)).recomputed == 0
