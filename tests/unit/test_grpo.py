"""The loss compared with a slow, obvious reference written from the formulas, for every setting."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.learner.grpo import (
    RATIO,
    RATIO_SQUARED,
    LossInputs,
    effective_sample_size,
    grpo_loss,
    k3,
)
from trainer.step_config import GrpoConfig

UNKNOWN = 3  # a token with unknown old and sampler logprobs


def inputs(*, reference: bool = False) -> LossInputs:
    """12 tokens of three sequences, with ratios on both sides of every clip range."""
    generator = torch.Generator().manual_seed(0)

    def random(scale: float) -> Tensor:
        return torch.randn(12, generator=generator, dtype=torch.float64) * scale

    new = random(1.0) - 3
    old, sampler = new + random(0.8), new + random(0.8)
    old[UNKNOWN] = sampler[UNKNOWN] = math.nan
    return LossInputs(
        logprobs=new.requires_grad_(),
        entropies=random(1.0).abs(),
        old_logprobs=old,
        sampler_logprobs=sampler,
        advantages=random(1.0),
        weights=random(1.0).abs() + 0.1,
        sequences=torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2]),
        reference_logprobs=new.detach() + random(0.5) if reference else None,
    )


def slow_loss(given: LossInputs, config: GrpoConfig) -> Tensor:
    """The formulas, applied to one token at a time."""
    low, high = config.clip_range
    n = len(given.logprobs)
    new = given.logprobs
    old = [new[i].detach() if i == UNKNOWN else given.old_logprobs[i] for i in range(n)]
    drift = None
    if given.reference_logprobs is not None:
        sampled = config.kl_penalty_source == "sample"
        source = [
            given.sampler_logprobs[i] if sampled and i != UNKNOWN else new[i] for i in range(n)
        ]
        drift = [(source[i] - given.reference_logprobs[i]).detach() for i in range(n)]
    total = torch.zeros((), dtype=torch.float64)
    for i in range(n):
        advantage = given.advantages[i]
        mine = [j for j in range(n) if given.sequences[j] == given.sequences[i]]
        token_ratio = (new[i] - old[i]).exp()
        sequence_ratio = torch.stack([new[j] - old[j] for j in mine]).mean().exp()
        ratio = {
            "token": token_ratio,
            "sequence": sequence_ratio,
            "average": (token_ratio + sequence_ratio) / 2,
            "geometric_average": token_ratio.sqrt() * sequence_ratio.sqrt(),
        }[config.importance_sampling_level]
        cap = config.max_negative_advantage_importance_sampling_weight
        if cap is not None and advantage < 0 and ratio > cap:
            ratio = torch.tensor(cap, dtype=torch.float64)
        if config.kimi_k2_tau is not None:
            advantage = advantage - config.kimi_k2_tau * (new[i] - old[i]).detach()
        if drift is not None and config.kl_penalty == "advantage":
            advantage = advantage + config.kl_penalty_coef * (sum(drift) / n - drift[i])
        if config.ppo:
            clipped = max(min(ratio, torch.tensor(high)), torch.tensor(low))
            term = -min(ratio * advantage, clipped * advantage)
            if config.dual_clip is not None and advantage < 0:
                term = min(term, -config.dual_clip * advantage)
        else:
            term = -min(max(float(ratio.detach()), low), high) * advantage * new[i]
        if config.mask_prob_ratio and not low < ratio < high:
            term = torch.zeros((), dtype=torch.float64)
        if config.truncated_importance_sampling is not None and i != UNKNOWN:
            weight = math.exp(float(old[i] - given.sampler_logprobs[i]))
            term = term * min(weight, config.truncated_importance_sampling)
        if given.reference_logprobs is not None and config.kl_penalty == "k3":
            away = given.reference_logprobs[i] - new[i]
            term = term + config.kl_penalty_coef * (away.exp() - 1 - away)
        total = total + term * given.weights[i]
    return total


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"epsilon": 0.1, "epsilon_high": 0.3},
        {"epsilon": 0.1, "epsilon_high": 0.3, "mask_prob_ratio": True},
        {"ppo": True},
        {"ppo": True, "epsilon": 0.1, "epsilon_high": 0.5},
        {"ppo": True, "dual_clip": 1.2},
        {"ppo": True, "mask_prob_ratio": True},
        *(
            {"importance_sampling_level": level, "ppo": ppo}
            for level in ("sequence", "average", "geometric_average")
            for ppo in (False, True)
        ),
        {"max_negative_advantage_importance_sampling_weight": 0.8},
        {"max_negative_advantage_importance_sampling_weight": 0.8, "ppo": True},
        {"kimi_k2_tau": 0.3},
        {"truncated_importance_sampling": 1.1},
        {"truncated_importance_sampling": 1.1, "ppo": True},
        {"kl_penalty_coef": 0.2},
        {"kl_penalty_coef": 0.2, "kl_penalty_source": "sample"},
        {"kl_penalty_coef": 0.2, "kl_penalty": "k3"},
        {"kl_penalty_coef": 0.2, "kl_penalty": "k3", "ppo": True, "kimi_k2_tau": 0.1},
    ],
    ids=lambda settings: ",".join(f"{k}={v}" for k, v in settings.items()) or "defaults",
)
def test_loss_and_gradient_are_those_of_the_formulas(settings: dict[str, Any]) -> None:
    config = GrpoConfig(**settings)
    given = inputs(reference=bool(config.kl_penalty_coef))
    expected = slow_loss(given, config)
    (gradient,) = torch.autograd.grad(expected, given.logprobs)
    output = grpo_loss(given, config)
    output.loss.backward()
    torch.testing.assert_close(output.loss, expected)
    torch.testing.assert_close(given.logprobs.grad, gradient)
    torch.testing.assert_close(output.metrics["loss/train"], expected.detach())


@pytest.mark.parametrize("ppo", [False, True])
def test_on_policy_gradient_is_reinforce(ppo: bool) -> None:
    given = inputs()
    on_policy = LossInputs(**{**vars(given), "old_logprobs": given.logprobs.detach()})
    config = GrpoConfig(ppo=ppo)
    grpo_loss(on_policy, config).loss.backward()
    torch.testing.assert_close(given.logprobs.grad, -given.advantages * given.weights)


def test_an_unknown_logprob_gives_the_gradient_of_reinforce() -> None:
    given = inputs()
    grpo_loss(given, GrpoConfig()).loss.backward()
    assert given.logprobs.grad is not None
    expected = -given.advantages[UNKNOWN] * given.weights[UNKNOWN]
    torch.testing.assert_close(given.logprobs.grad[UNKNOWN], expected)


def test_a_clipped_token_has_no_gradient_under_ppo() -> None:
    given = LossInputs(
        logprobs=torch.tensor([-1.0, -1.0], requires_grad=True),
        entropies=torch.zeros(2),
        old_logprobs=torch.tensor([-2.0, -2.0]),
        sampler_logprobs=torch.tensor([-2.0, -2.0]),
        advantages=torch.tensor([1.0, -1.0]),
        weights=torch.ones(2),
        sequences=torch.tensor([0, 1]),
    )
    output = grpo_loss(given, GrpoConfig(ppo=True))
    output.loss.backward()
    torch.testing.assert_close(given.logprobs.grad, torch.tensor([0.0, math.e]))
    assert output.metrics["loss/clip_frac"] == 1


def test_metrics_report_how_far_the_sampler_is_from_the_learner() -> None:
    given = inputs()
    metrics = grpo_loss(given, GrpoConfig()).metrics
    known = torch.arange(12) != UNKNOWN
    gap = (given.logprobs.detach() - given.sampler_logprobs)[known]
    torch.testing.assert_close(metrics["loss/sampler_gap"], gap.abs().sum())
    torch.testing.assert_close(metrics["loss/sampler_kl"], (gap.exp() - 1 - gap).sum())
    moved = (given.logprobs.detach() - given.old_logprobs)[known]
    torch.testing.assert_close(metrics["loss/kl_div"], (moved.exp() - 1 - moved).sum())
    torch.testing.assert_close(metrics["loss/entropy"], (given.entropies * given.weights).sum())


def test_k3_is_zero_only_where_the_policies_agree() -> None:
    new = torch.tensor([-1.0, -1.0, -1.0])
    other = torch.tensor([-1.0, -0.5, -2.0])
    expected = torch.tensor([0.0, math.exp(0.5) - 1.5, math.exp(-1.0)])
    torch.testing.assert_close(k3(new, other), expected)


def test_the_effective_sample_size_falls_as_the_policy_leaves_the_sampler() -> None:
    def size(given: LossInputs) -> float:
        metrics = {
            name: float(it) / 12 for name, it in grpo_loss(given, GrpoConfig()).metrics.items()
        }
        found = effective_sample_size(metrics)
        assert not {RATIO, RATIO_SQUARED} & metrics.keys()
        return found

    given = inputs()
    own = dataclasses.replace(given, sampler_logprobs=given.logprobs.detach())
    assert size(own) == 1
    ratios = (given.logprobs.detach() - given.sampler_logprobs).exp().nan_to_num(1.0)
    expected = float(ratios.sum() ** 2 / (ratios**2).sum() / 12)
    assert size(given) == pytest.approx(expected) and expected < 0.9
    far = given.sampler_logprobs.clone()
    far[0] = -9999.0  # a token that only a constraint allowed
    assert size(dataclasses.replace(given, sampler_logprobs=far)) == pytest.approx(1 / 12)
