"""Every setting of a train call has its effect, or none where it only costs memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kit.manifest import sha256
from tests.unit.tiny_learner import LORA, adapter, groups, learner, train, uneven_groups
from trainer import checkpoint
from trainer.base_model.resolve import resolve
from trainer.errors import CheckpointError, Unsupported
from trainer.learner import state
from trainer.learner.learner import Learner
from trainer.learner.ready import batches_of
from trainer.step_config import GrpoConfig


@pytest.mark.parametrize(
    "settings",
    [
        {"activation_checkpointing": True},
        {"logprob_calculation_chunk_size": 3},
        {"precalculate_logprobs": False},
        {"epsilon": 1.0, "epsilon_high": 4.0},
    ],
    ids=str,
)
def test_settings_that_only_affect_memory_do_not_change_the_result(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    train(learner(), tmp_path / "plain", groups(0))
    train(learner(), tmp_path / "other", groups(0), **settings)
    other = adapter(tmp_path / "other")
    for name, tensor in adapter(tmp_path / "plain").items():
        torch.testing.assert_close(tensor, other[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"learning_rate": 2e-3},
        {"lr_scheduler_type": "linear", "max_steps": 2},
        {"lr_scheduler_type": "cosine", "max_steps": 3},
        {"warmup_steps": 3},
        {"scale_learning_rate_by_reward_std_dev": True},
        {"num_trajectories_learning_rate_multiplier_power": 0.5},
        {"weight_decay": 0.0},
        {"adam_beta1": 0.5},
        {"adam_beta2": 0.9},
        {"adam_epsilon": 1.0},
        {"max_grad_norm": 1e-9},
        {"grad_accumulation_sequences": 2},
        {"scale_rewards": True, "scale_advantages": False, "max_grad_norm": 1e9},
        {"scale_advantages": False, "max_grad_norm": 1e9},
        {"advantage_balance": 0.9},
        {"loss_mean": "token"},
        {"ppo": True},
        {"epsilon": 0.0, "epsilon_high": 0.0},
        {"ppo": True, "dual_clip": 1.01},
        {"importance_sampling_level": "sequence"},
        {"mask_prob_ratio": True, "epsilon": 0.2},
        {"max_negative_advantage_importance_sampling_weight": 0.1},
        {"kimi_k2_tau": 1.0},
        {"precalculate_logprobs": True},
        {"truncated_importance_sampling": 0.5},
        {"kl_penalty_coef": 1.0},
        {"kl_penalty_coef": 1.0, "kl_penalty": "k3"},
        {"packed_sequence_length": 64},
        {"max_seq_length": 28},
    ],
    ids=str,
)
def test_no_setting_is_ignored(
    started: tuple[Learner, Path, dict[str, torch.Tensor]],
    tmp_path: Path,
    settings: dict[str, Any],
) -> None:
    """It takes a second step, because some settings only act once the LoRA is not zero."""
    one, source, plain = started
    checkpoint.fork(source, tmp_path)
    train(one, tmp_path, uneven_groups(), **settings)
    changed = adapter(tmp_path, 2)
    assert max(float((plain[name] - changed[name]).abs().max()) for name in plain) > 1e-7


@pytest.fixture(scope="module")
def started(
    tmp_path_factory: pytest.TempPathFactory,
    art_cache: str,
) -> tuple[Learner, Path, dict[str, torch.Tensor]]:
    """A learner, a first step to fork from, and the LoRA of a second step with the defaults."""
    at = tmp_path_factory.mktemp("started")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ART_CACHE", art_cache)
        one = learner()
    for _ in range(2):
        train(one, at, uneven_groups())
    return one, at / "0001", adapter(at, 2)


@pytest.mark.parametrize(("rows", "processes", "size"), [(None, 1, 1), (None, 2, 2), (3, 2, 3)])
def test_a_gradient_step_has_a_row_for_each_process_unless_set(
    tmp_path: Path, rows: int | None, processes: int, size: int
) -> None:
    one = learner()
    one.prepare(tmp_path, LORA)
    assert one.state is not None
    config = GrpoConfig(packed_sequence_length=64, grad_accumulation_sequences=rows)
    ready = one.ready(groups(0, 4), config, 0)
    batches = batches_of(ready, one.state, one.device, processes)
    assert len(batches) > 1 and len(batches[0]) == size


def test_the_reference_may_be_a_checkpoint(tmp_path: Path) -> None:
    one = learner()
    train(one, tmp_path, groups(0))
    reference = str(tmp_path / "0001")
    rows = train(one, tmp_path, groups(1, 1), kl_penalty_coef=0.1, kl_ref_adapter_path=reference)
    assert rows[0]["loss/kl_policy_ref"] == pytest.approx(0.0, abs=1e-6)
    (base, *_) = train(one, tmp_path, groups(1, 1), kl_penalty_coef=0.1)
    assert base["loss/kl_policy_ref"] != pytest.approx(0.0, abs=1e-6)


def test_a_reference_of_another_lora_or_base_model_is_refused(tmp_path: Path) -> None:
    """It would be computed with the `alpha` and the base model of the run that trains."""
    one = learner()
    one.prepare(tmp_path / "alpha", LORA.model_copy(update={"alpha": 16}))
    learner("other").prepare(tmp_path / "base", LORA)
    one.prepare(tmp_path / "seed", LORA.model_copy(update={"seed": 9}))
    for name, what in (("alpha", "LoRA"), ("base", "base model")):
        settings = {"kl_penalty_coef": 0.1, "kl_ref_adapter_path": str(tmp_path / name / "0000")}
        with pytest.raises(CheckpointError, match=f"has the {what}") as caught:
            train(one, tmp_path / "run", groups(0), **settings)
        assert "kl_ref_adapter_path" in str(caught.value.hint)
    reference = str(tmp_path / "seed" / "0000")
    train(one, tmp_path / "run", groups(0), kl_penalty_coef=0.1, kl_ref_adapter_path=reference)


def test_every_weight_can_be_trained(tmp_path: Path) -> None:
    one = learner()
    train(one, tmp_path / "a", groups(0), None)
    with pytest.raises(Unsupported, match="kl_ref_adapter_path"):
        train(one, tmp_path / "a", groups(1), None, kl_penalty_coef=0.1, kl_ref_adapter_path="x")
    train(one, tmp_path / "a", groups(1), None, kl_penalty_coef=0.1)
    before, after = (load_file(tmp_path / "a" / step / state.FULL) for step in ("0000", "0002"))
    assert before.keys() == load_file(resolve("tiny-random") / "model.safetensors").keys()
    assert all(bool((before[name] != after[name]).any()) for name in before)
    resumed = learner()
    train(resumed, tmp_path / "b", groups(0), None)
    resumed = learner()
    train(resumed, tmp_path / "b", groups(1), None, kl_penalty_coef=0.1)
    assert sha256(tmp_path / "a" / "0002" / state.FULL) == sha256(
        tmp_path / "b" / "0002" / state.FULL
    )


def test_the_checkpoint_contains_a_picture_of_the_packed_rows(tmp_path: Path) -> None:
    train(learner(), tmp_path, groups(0), plot_tensors=True)
    picture = tmp_path / "0001" / "packed_tensors.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.name in checkpoint.verify(tmp_path / "0001")["files"]
