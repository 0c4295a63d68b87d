"""The loss of one gradient step, on one page: GRPO with ART's settings and some that ART lacks.

Everything is per chosen token, in flat tensors [N]; there is no padding to mask. The default is
CISPO, as in ART: -sg(clip(rho, 0, 5)) * A * logprob with rho = exp(new - old). The mean is over
tokens, with the same total weight for each trajectory. There is no KL term. Advantages are centred
on the group's mean but not divided by its standard deviation.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.step_config import GrpoConfig

# Sums over tokens of the policy's probability over the sampler's, and of its square.
RATIO, RATIO_SQUARED = "loss/sampler_ratio", "loss/sampler_ratio_squared"
LARGEST_LOG_RATIO = 20.0  # squares of larger ratios overflow


@dataclass(frozen=True)
class LossInputs:
    """The data of the N chosen tokens of a gradient step."""

    logprobs: Tensor  # [N] current policy, with gradient
    entropies: Tensor  # [N] current policy
    old_logprobs: Tensor  # [N] the policy that ratios are relative to; NaN where unknown
    sampler_logprobs: Tensor  # [N] reported by the engine; NaN where unknown
    advantages: Tensor  # [N]
    weights: Tensor  # [N] mean 1 over a step
    sequences: Tensor  # [N] number of the sequence that the token belongs to
    reference_logprobs: Tensor | None = None  # [N] only with a KL penalty


@dataclass(frozen=True)
class LossOutput:
    """Sums over tokens, so that rows and processes can be added. Divide by the token count."""

    loss: Tensor
    metrics: dict[str, Tensor]


def grpo_loss(inputs: LossInputs, config: GrpoConfig) -> LossOutput:
    """Return the loss and the metrics, each summed over tokens."""
    new = inputs.logprobs
    # An unknown logprob counts as the current one: its ratio is 1, its gradient REINFORCE's.
    old = torch.where(inputs.old_logprobs.isnan(), new.detach(), inputs.old_logprobs)
    advantages = inputs.advantages
    log_ratio = new - old
    ratio = importance_ratio(log_ratio, inputs.sequences, config)
    low, high = config.clip_range
    if (cap := config.max_negative_advantage_importance_sampling_weight) is not None:
        ratio = torch.where(advantages < 0, ratio.clamp(max=cap), ratio)
    if config.kimi_k2_tau is not None:
        advantages = advantages - config.kimi_k2_tau * log_ratio.detach()
    if inputs.reference_logprobs is not None and config.kl_penalty == "advantage":
        drift = (_kl_source(inputs, config) - inputs.reference_logprobs).detach()
        advantages = advantages + config.kl_penalty_coef * (drift.mean() - drift)

    clipped = ratio.clamp(low, high)
    if config.ppo:
        gain = torch.minimum(ratio * advantages, clipped * advantages)
        if config.dual_clip is not None:
            floor = config.dual_clip * advantages
            gain = torch.where(advantages < 0, torch.maximum(gain, floor), gain)
        was_clipped = clipped * advantages < ratio * advantages
    else:
        gain = clipped.detach() * advantages * new
        was_clipped = clipped != ratio
    if config.mask_prob_ratio:
        gain = torch.where((ratio > low) & (ratio < high), gain, 0.0)
    loss = -gain
    if config.truncated_importance_sampling is not None:
        loss = loss * mismatch_weight(inputs, old, config.truncated_importance_sampling)
    if inputs.reference_logprobs is not None and config.kl_penalty == "k3":
        loss = loss + config.kl_penalty_coef * k3(new, inputs.reference_logprobs)
    return LossOutput(
        (loss * inputs.weights).sum(), _metrics(inputs, config, old, loss, was_clipped, ratio)
    )


def _kl_source(inputs: LossInputs, config: GrpoConfig) -> Tensor:
    """[N] logprobs that the KL penalty compares with the reference's."""
    new, sampler = inputs.logprobs.detach(), inputs.sampler_logprobs
    if config.kl_penalty_source == "current_learner":
        return new
    return torch.where(sampler.isnan(), new, sampler)


def importance_ratio(log_ratio: Tensor, sequences: Tensor, config: GrpoConfig) -> Tensor:
    """[N] ratio of new to old probability, per token or per sequence (GSPO)."""
    level = config.importance_sampling_level
    if level == "token":
        return log_ratio.exp()
    mean = sequence_mean(log_ratio, sequences)
    if level == "sequence":
        return mean.exp()
    if level == "average":
        return (log_ratio.exp() + mean.exp()) / 2
    return ((log_ratio + mean) / 2).exp()


def sequence_mean(values: Tensor, sequences: Tensor) -> Tensor:
    """[N] mean of `values` over the sequence of each token."""
    count = int(sequences.max()) + 1
    total = values.new_zeros(count).index_add(0, sequences, values)
    tokens = values.new_zeros(count).index_add(0, sequences, torch.ones_like(values))
    return (total / tokens)[sequences]


def mismatch_weight(inputs: LossInputs, old: Tensor, cap: float) -> Tensor:
    """[N] ratio of the learner's to the sampler's probability of the token, at most `cap`."""
    sampler = torch.where(inputs.sampler_logprobs.isnan(), old, inputs.sampler_logprobs)
    return (old - sampler).exp().clamp(max=cap).detach()


def effective_sample_size(metrics: dict[str, float]) -> float:
    """The effective sample size of the importance ratios, as a share of the tokens."""
    ratio, squared = metrics.pop(RATIO), metrics.pop(RATIO_SQUARED)
    return min(ratio**2 / squared, 1.0)


def k3(new: Tensor, other: Tensor) -> Tensor:
    """[N] Schulman's k3 estimate of KL(new || other): never negative, unbiased, low variance."""
    difference = other - new
    return difference.exp() - 1 - difference


def _metrics(
    inputs: LossInputs,
    config: GrpoConfig,
    old: Tensor,
    loss: Tensor,
    was_clipped: Tensor,
    ratio: Tensor,
) -> dict[str, Tensor]:
    with torch.no_grad():
        new, weights = inputs.logprobs.detach(), inputs.weights
        sampler = torch.where(inputs.sampler_logprobs.isnan(), new, inputs.sampler_logprobs)
        weight = (new - sampler).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
        metrics = {
            "loss/train": (loss * weights).sum(),
            "loss/entropy": (inputs.entropies * weights).sum(),
            "loss/kl_div": k3(old, new).sum(),
            "loss/clip_frac": was_clipped.float().sum(),
            "loss/ratio": ratio.sum(),
            # The difference between the engine's and the learner's probabilities of these tokens.
            "loss/sampler_kl": k3(sampler, new).sum(),
            "loss/sampler_gap": (new - sampler).abs().sum(),
            RATIO: weight.sum(),
            RATIO_SQUARED: (weight**2).sum(),
        }
        if inputs.reference_logprobs is not None:
            drift = _kl_source(inputs, config) - inputs.reference_logprobs
            metrics["loss/kl_policy_ref"] = drift.sum()
    return metrics
