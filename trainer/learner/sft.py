"""Converts trajectories to the samples of supervised steps, which train on assistant messages.

The loss is GRPO's. With an advantage of one, and the current policy as the one that sampled, CISPO
is -logprob per token: the cross-entropy.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from trainer import exact_tokens
from trainer.base_model.tokenizer import Tokenizer
from trainer.errors import BadRequest
from trainer.learner.prefix_tree import Sample
from trainer.learner.prepare import Prepared, check_ids
from trainer.learner.tokenize import Tokenized, tokenize_trajectory
from trainer.step_config import GrpoConfig, SftConfig

SUPERVISED = GrpoConfig(allow_training_without_logprobs=True, max_grad_norm=1.0)


def prepare_sft(
    tokenizer: Tokenizer,
    groups: Sequence[Mapping[str, Any]],
    config: SftConfig,
    *,
    limit: int,
    vocabulary: int,
) -> tuple[Prepared, list[list[Sample]]]:
    """Return the metrics, and the samples of each gradient step."""
    prepared = Prepared()
    trajectories = [member for group in groups for member in group.get("trajectories") or []]
    kept: list[list[Sample]] = []
    for number, trajectory in enumerate(trajectories):
        tokenized = _tokenized(tokenizer, trajectory, number, config.assistant_turns == "last")
        check_ids(tokenized, vocabulary)
        samples = _samples(tokenized, number)
        if not samples:
            prepared.drop("no_trainable_tokens", 0, trajectory=number)
        elif any(len(sample.ids) > limit for sample in samples):
            prepared.drop("too_long", 0, trajectory=number)
        else:
            kept.append(samples)
    size = config.trajectories_a_step
    batches = [
        list(itertools.chain.from_iterable(kept[at : at + size]))
        for at in range(0, len(kept), size)
    ]
    if len(config.rates(len(batches))) != len(batches):
        raise BadRequest(
            f"There are `{len(batches)}` gradient steps and fewer learning rates",
            hint="Set one `learning_rate`, or one for each gradient step",
        )
    prepared.samples = list(itertools.chain.from_iterable(batches))
    tokens = sum(sum(sample.mask) for sample in prepared.samples)
    prepared.metrics = {
        "data/step_num_trajectories": float(len(trajectories)),
        "data/step_trainer_tokens": float(tokens),
        "data/step_num_gradient_steps": float(len(batches)),
        "num_gradient_steps": float(len(batches)),
    }
    for drop in prepared.dropped:
        name = f"data/dropped_{drop['reason']}"
        prepared.metrics[name] = prepared.metrics.get(name, 0.0) + 1
    return prepared, batches


def _tokenized(
    tokenizer: Tokenizer, trajectory: Mapping[str, Any], number: int, only_last: bool
) -> Tokenized:
    histories = [trajectory, *(trajectory.get("additional_histories") or [])]
    convert = partial(_last_as_choice, number=number) if only_last else _as_choices
    converted = [{**history, "messages_and_choices": convert(history)} for history in histories]
    whole = {**converted[0], "additional_histories": converted[1:]}
    return tokenize_trajectory(tokenizer, whole, allow_without_logprobs=True)


def _samples(tokenized: Tokenized, number: int) -> list[Sample]:
    return [
        Sample(
            ids=sequence.ids,
            mask=sequence.mask,
            logprobs=[math.nan] * len(sequence.ids),
            advantage=1.0,
            weight=1.0,
            group=number,
            trajectory=number,
        )
        for sequence in tokenized.sequences
    ]


def _as_choices(history: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The messages, with those of assistants as choices, so that they are trained on."""
    return [
        {"finish_reason": "stop", "message": item.get("message", item)}
        if item.get("role") == "assistant" or exact_tokens.is_ambiguous(item)
        else item
        for item in history.get("messages_and_choices") or []
    ]


def _last_as_choice(history: Mapping[str, Any], number: int) -> list[Mapping[str, Any]]:
    """The messages, with only the last one as a choice."""
    items = history.get("messages_and_choices") or []
    messages = [item.get("message") or item for item in items]
    if messages and messages[-1].get("role") != "assistant":
        raise BadRequest(
            f"Trajectory `{number}` ends with a `{messages[-1].get('role')}` message",
            hint="With `assistant_turns: last` the last message must be the assistant's",
        )
    # A choice stays one: its message may say less than its tokens.
    return [*messages[:-1], *_as_choices({"messages_and_choices": items[-1:]})]
