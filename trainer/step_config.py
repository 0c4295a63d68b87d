"""Settings of one training step, by GRPO or supervised."""

import math
from typing import Any, Literal

import pydantic
from pydantic import Field

from kit.config import Config, validate

LARGEST = 1e12  # of any number in the settings of a step


class GrpoConfig(Config):
    """One GRPO step. Settings that ART has too keep ART's names and defaults."""

    learning_rate: float = Field(5e-5, gt=0)
    """AdamW learning rate of the trained weights."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of the learning rate: `linear` and `cosine` fall to zero at `max_steps`."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises to its full value."""
    max_steps: int | None = Field(None, ge=1)
    """Last step of the schedule; required unless the schedule is constant."""
    scale_learning_rate_by_reward_std_dev: bool = False
    """Multiply the learning rate by the mean standard deviation of the groups' rewards."""
    num_trajectories_learning_rate_multiplier_power: float = Field(0.0, ge=0)
    """Multiply the learning rate by the gradient step's number of trajectories to this power."""
    weight_decay: float = Field(0.1, ge=0)
    """AdamW weight decay."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's decay of the mean gradient."""
    adam_beta2: float = Field(0.99, ge=0, lt=1)
    """AdamW's decay of the mean squared gradient."""
    adam_epsilon: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    max_grad_norm: float = Field(0.1, gt=0)
    """Gradients are clipped to this norm."""
    grad_accumulation_sequences: int | None = Field(None, ge=1)
    """Packed rows in one gradient step; None means one for each process of the learner."""

    scale_rewards: bool = False
    """Divide a group's advantages by the standard deviation of its rewards. Off by default, because
    it weights groups by their difficulty."""
    scale_advantages: bool = True
    """Scale the advantages of a step to a mean size of one, as ART does."""
    advantage_balance: float = Field(0.0, ge=-1, le=1)
    """1 trains on positive advantages only, -1 on negative ones only, 0 on both equally."""
    loss_mean: Literal["trajectory", "token"] = "trajectory"
    """Whether every trajectory has the same weight (as in ART), or every token."""

    ppo: bool = False
    """Use PPO's clipped loss instead of CISPO's clipped importance weight."""
    epsilon: float | None = Field(None, ge=0)
    """Lower clip of the ratio, 1 - epsilon; None means 1.0, or 0.2 with `ppo`."""
    epsilon_high: float | None = Field(None, ge=0)
    """Upper clip of the ratio, 1 + epsilon_high; None means 4.0, or `epsilon` with `ppo`."""
    dual_clip: float | None = Field(None, gt=1)
    """With `ppo`: limit the loss of a token with a negative advantage to this multiple of the
    advantage's size."""
    importance_sampling_level: Literal["token", "sequence", "average", "geometric_average"] = (
        "token"
    )
    """Level at which the ratio is computed; `sequence` is GSPO."""
    mask_prob_ratio: bool = False
    """Drop tokens with a ratio outside the clip range."""
    max_negative_advantage_importance_sampling_weight: float | None = Field(None, gt=0)
    """Maximum ratio of tokens with a negative advantage."""
    kimi_k2_tau: float | None = Field(None, gt=0)
    """Subtract tau * (new - old logprob) from the advantage."""
    precalculate_logprobs: bool = False
    """Use the learner's own logprobs before the first gradient step as the old logprobs."""
    truncated_importance_sampling: float | None = Field(None, gt=0)
    """Weight each token by the learner's probability over the sampler's, up to this limit. Implies
    precalculated logprobs."""
    allow_training_without_logprobs: bool = False
    """Train on choices without logprobs, as if the current policy had sampled them."""

    kl_penalty_coef: float = Field(0.0, ge=0)
    """Weight of the penalty for moving away from the reference."""
    kl_penalty: Literal["advantage", "k3"] = "advantage"
    """Shape the advantages as ART does, or add the k3 estimate to the loss."""
    kl_penalty_source: Literal["current_learner", "sample"] = "current_learner"
    """Logprobs that the penalty compares with the reference's: those of the weights in training, or
    those with which the tokens were sampled."""
    kl_ref_adapter_path: str | None = None
    """Checkpoint to use as the reference; None means the base model."""

    packed_sequence_length: int | None = Field(None, ge=16)
    """Tokens in a packed row; None means the longest sequence, rounded up to 2,048."""
    max_seq_length: int | None = Field(None, ge=16)
    """Maximum tokens of a sequence; longer trajectories are dropped and counted. None means the
    model's limit."""
    max_steps_off_policy: int | None = Field(None, ge=0)
    """Steps that a trajectory's oldest token may be behind the weights in training; older
    trajectories are dropped and counted. None drops none. Tokens whose step is unknown count as
    new."""
    logprob_calculation_chunk_size: int | None = Field(None, ge=1)
    """Tokens whose logits are in memory at once; None means 8,192 on a GPU, else 1,024."""
    activation_checkpointing: bool | None = None
    """Recompute each layer in the backward pass, which is slower but needs far less memory. None
    means as many layers as the free memory requires on one GPU, and all layers on several."""
    plot_tensors: bool = False
    """Save a picture of the packed rows in the checkpoint."""

    @pydantic.model_validator(mode="after")
    def _settings_agree(self) -> "GrpoConfig":
        _check_size(self)
        if self.lr_scheduler_type != "constant" and self.max_steps is None:
            raise ValueError(f"lr_scheduler_type `{self.lr_scheduler_type}` needs max_steps")
        if self.dual_clip is not None and not self.ppo:
            raise ValueError("dual_clip needs ppo")
        if self.kl_ref_adapter_path is not None and not self.kl_penalty_coef:
            raise ValueError("kl_ref_adapter_path needs kl_penalty_coef")
        if self.kl_penalty_source == "sample" and self.kl_penalty == "k3":
            raise ValueError("kl_penalty_source `sample` needs kl_penalty `advantage`")
        return self

    @property
    def clip_range(self) -> tuple[float, float]:
        """The lowest and the highest ratio."""
        low = self.epsilon if self.epsilon is not None else (0.2 if self.ppo else 1.0)
        high = self.epsilon_high if self.epsilon_high is not None else (low if self.ppo else 4.0)
        return 1 - low, 1 + high

    def rate_after(self, step: int) -> float:
        """The learning rate of the train call that follows `step`."""
        return self.learning_rate * self._schedule(step)

    def _schedule(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.lr_scheduler_type == "constant":
            return 1.0
        assert self.max_steps is not None  # validated above
        span = max(self.max_steps - self.warmup_steps, 1)
        progress = min((step - self.warmup_steps) / span, 1.0)
        if self.lr_scheduler_type == "linear":
            return 1 - progress
        return (1 + math.cos(math.pi * progress)) / 2


class SftConfig(Config):
    """One supervised step: cross-entropy on the assistant messages of trajectories."""

    kind: Literal["sft"] = "sft"
    """Distinguishes these settings from those of a GRPO step."""
    learning_rate: float | tuple[float, ...] = 5e-5
    """AdamW learning rate: one for all gradient steps, or one for each."""
    batch_size: int | Literal["auto"] = "auto"
    """Trajectories in one gradient step; `auto` means 2, as in ART."""
    assistant_turns: Literal["all", "last"] = "all"
    """Train on every assistant message, or only on the last, which must end the conversation."""
    max_seq_length: int | None = Field(None, ge=16)
    """Maximum tokens of a sequence; longer trajectories are dropped and counted. None means the
    model's limit."""

    @pydantic.model_validator(mode="after")
    def _is_positive(self) -> "SftConfig":
        rates = (
            self.learning_rate if isinstance(self.learning_rate, tuple) else [self.learning_rate]
        )
        _check_size(self)
        # ART's own schedules end at exactly 0.
        if not rates or min(rates) < 0 or max(rates) == 0:
            raise ValueError(f"learning_rate is `{self.learning_rate}`, but must be above 0")
        if isinstance(self.batch_size, int) and self.batch_size < 1:
            raise ValueError(f"batch_size is `{self.batch_size}`, but must be at least 1")
        return self

    @property
    def trajectories_a_step(self) -> int:
        return 2 if self.batch_size == "auto" else self.batch_size

    def rates(self, steps: int) -> list[float]:
        """Return the learning rate of each gradient step; a list may have unused rates."""
        if isinstance(self.learning_rate, float):
            return [self.learning_rate] * steps
        return list(self.learning_rate[:steps])


StepConfig = GrpoConfig | SftConfig


def read_step_config(values: dict[str, Any]) -> StepConfig:
    """Validate the settings of a step of either kind."""
    kind: type[GrpoConfig | SftConfig] = SftConfig if values.get("kind") == "sft" else GrpoConfig
    return validate(kind, values, source="config")


def _check_size(config: Config) -> None:
    """Refuse numbers that overflow in the learner's arithmetic."""
    for name, value in config:
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int | float) and abs(number) > LARGEST:
                raise ValueError(f"{name} must be at most {LARGEST:g}")
