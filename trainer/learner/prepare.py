"""Converts the groups of a train request to samples with advantages, and reports dropped ones."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.base_model.tokenizer import Tokenizer
from trainer.errors import BadRequest
from trainer.learner.prefix_tree import Sample
from trainer.learner.tokenize import Tokenized, tokenize_trajectory
from trainer.rewards import are_equal, reward_of
from trainer.step_config import GrpoConfig

Group = Mapping[str, Any]
Metrics = dict[str, float]


@dataclass
class Prepared:
    """The samples of a step, the groups and trajectories dropped with reasons, and metrics."""

    samples: list[Sample] = field(default_factory=list)
    dropped: list[dict[str, Any]] = field(default_factory=list)
    metrics: Metrics = field(default_factory=dict)
    reward_std_dev: float = 0.0
    """Standard deviation of the rewards, averaged over trainable groups."""

    def drop(self, reason: str, group: int, **detail: Any) -> None:
        self.dropped.append({"reason": reason, "group": group, **detail})


def prepare(
    tokenizer: Tokenizer,
    groups: Sequence[Group],
    config: GrpoConfig,
    *,
    limit: int,
    vocabulary: int,
    step: int = 0,
) -> Prepared:
    """Tokenise and weight every group. Sequences longer than `limit` are dropped.

    `step` is the step that is trained from: the age of a token is the number of steps since it was
    sampled.
    """
    result = Prepared()
    ages = Counter[int]()
    deviations = []
    counts = Counter[str]()
    trajectories = trainable = 0
    for index, group in enumerate(groups):
        members = list(group.get("trajectories") or [])
        trajectories += len(members)
        rewards = [reward_of(member, index, number) for number, member in enumerate(members)]
        advantages = group_advantages(rewards, scale=config.scale_rewards)
        if advantages is None:
            result.drop("equal_rewards" if members else "empty_group", index, size=len(members))
            continue
        before = len(result.samples)
        for number, (member, advantage) in enumerate(zip(members, advantages, strict=True)):
            tokenized = tokenize_trajectory(
                tokenizer,
                member,
                allow_without_logprobs=config.allow_training_without_logprobs,
            )
            check_ids(tokenized, vocabulary)
            age = {at: max(step - at, 0) for at in tokenized.sampled_at}
            reason = _reason_to_drop(tokenized, limit, max(age.values(), default=0), config)
            # A trajectory of the mean reward has no gradient, except from other losses.
            learns = bool(advantage or config.kl_penalty_coef or config.kimi_k2_tau)
            counts.update(tokenized.counts(dropped=reason is not None or not learns))
            if reason:
                result.drop(reason, index, trajectory=number)
            elif learns:
                for at, tokens in tokenized.sampled_at.items():
                    ages[age[at]] += tokens
                result.samples += _samples(tokenized, advantage, index, len(result.samples), number)
        if len(result.samples) > before:
            trainable += 1
            deviations.append(statistics.pstdev(rewards))
    if result.samples:
        _balance(result.samples, config)
        result.reward_std_dev = statistics.fmean(deviations)
    result.metrics = {
        "data/step_num_groups_submitted": float(len(groups)),
        "data/step_num_groups_trainable": float(trainable),
        "data/step_num_scenarios": float(len(groups)),
        "data/step_num_trajectories": float(trajectories),
        "data/step_trainer_tokens": float(sum(sum(sample.mask) for sample in result.samples)),
        **_about_choices(counts),
        **_about_ages(ages),
    }
    for drop in result.dropped:
        name = f"data/dropped_{drop['reason']}"
        result.metrics[name] = result.metrics.get(name, 0.0) + 1
    return result


def _about_choices(counts: Mapping[str, int]) -> Metrics:
    """How many trained choices are exact and how many are not, and those that were left out."""
    names = (
        *("retokenized", "exact_prompts", "rendered_prompts"),
        *("ambiguous_choices", "choices_without_logprobs"),
    )
    trained = counts.get("exact_prompts", 0) + counts.get("rendered_prompts", 0)
    return {
        **{f"data/{name}": float(counts.get(name, 0)) for name in names},
        "data/constrained_share": counts.get("constrained", 0) / max(trained, 1),
    }


def _about_ages(ages: Mapping[int, int]) -> Metrics:
    """How many steps before this one the trained tokens were sampled, where that is known."""
    if not ages:
        return {}
    total = sum(age * tokens for age, tokens in ages.items())
    return {
        "policy_age/mean": total / sum(ages.values()),
        "policy_age/max": float(max(ages)),
    }


def group_advantages(rewards: Sequence[float], *, scale: bool) -> list[float] | None:
    """Rewards centred on the group's mean, or None if all are equal (nothing to learn)."""
    if are_equal(rewards):  # not `centred == 0`: means are inexact
        return None
    mean = statistics.fmean(rewards)
    divisor = statistics.pstdev(rewards) + 1e-6 if scale else 1.0
    return [(reward - mean) / divisor for reward in rewards]


def check_ids(tokenized: Tokenized, vocabulary: int) -> None:
    """Raise BadRequest for tokens that the model does not have."""
    for sequence in tokenized.sequences:
        for token in (min(sequence.ids), max(sequence.ids)):
            if not 0 <= token < vocabulary:
                raise BadRequest(
                    f"A choice has the token id `{token}`, and the model has `{vocabulary}` tokens",
                    hint="Train the model that sampled it, and send choices unchanged",
                )


def _reason_to_drop(tokenized: Tokenized, limit: int, age: int, config: GrpoConfig) -> str | None:
    if not tokenized.chosen:
        if tokenized.ambiguous_choices:
            return "ambiguous"
        return "no_logprobs" if tokenized.choices_without_logprobs else "no_trainable_tokens"
    if any(len(sequence.ids) > limit for sequence in tokenized.sequences):
        return "too_long"
    if config.max_steps_off_policy is not None and age > config.max_steps_off_policy:
        return "stale"
    return None


def _samples(
    tokenized: Tokenized, advantage: float, group: int, trajectory: int, number: int
) -> list[Sample]:
    weight = 1 / tokenized.chosen
    return [
        Sample(
            ids=sequence.ids,
            mask=sequence.mask,
            logprobs=sequence.logprobs,
            advantage=advantage,
            weight=weight,
            group=group,
            trajectory=trajectory,
            number=number,
        )
        for sequence in tokenized.sequences
    ]


def _balance(samples: list[Sample], config: GrpoConfig) -> None:
    """Scale weights to a mean of 1 over tokens and, if set, advantages to a mean size of 1."""
    tokens = [sum(sample.mask) for sample in samples]
    if config.loss_mean == "token":
        for sample in samples:
            sample.weight = 1.0
    mean = sum(sample.weight * n for sample, n in zip(samples, tokens, strict=True)) / sum(tokens)
    for sample in samples:
        sample.weight /= mean
        if sample.advantage * config.advantage_balance < 0:
            sample.advantage *= 1 - abs(config.advantage_balance)
    if config.scale_advantages:
        size = sum(
            abs(sample.advantage) * sample.weight * n
            for sample, n in zip(samples, tokens, strict=True)
        ) / sum(tokens)
        for sample in samples:
            sample.advantage /= size or 1.0
