"""Supervised steps: the loss is the cross-entropy of assistant messages only."""

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.base_model.resolve import resolve
from trainer.base_model.tokenizer import Tokenizer
from trainer.config import LoraConfig
from trainer.errors import BadRequest
from trainer.exact_tokens import ExactTokens
from trainer.learner.learner import Learner
from trainer.learner.sft import prepare_sft
from trainer.step_config import SftConfig

TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind"},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "More"},
    {"role": "assistant", "content": "Bye"},
]


def groups(*talks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"trajectories": [{"messages_and_choices": talk} for talk in talks]}]


def test_only_assistant_messages_and_their_ends_of_turn_are_trained() -> None:
    tokenizer = Tokenizer(resolve("tiny-random"))
    prepared, batches = prepare_sft(
        tokenizer, groups(TALK), SftConfig(), limit=1000, vocabulary=260
    )
    [[sample]] = batches
    trained = [token for token, chosen in zip(sample.ids, sample.mask, strict=True) if chosen]
    assert tokenizer.decode(trained) == "Hello<|im_end|>Bye<|im_end|>"
    assert tokenizer.decode(sample.ids) == tokenizer.render(TALK, None, False).rstrip("\n")
    assert prepared.metrics["data/step_trainer_tokens"] == len(trained)


def test_only_the_last_turn_is_trained_if_it_is_the_assistants() -> None:
    tokenizer = Tokenizer(resolve("tiny-random"))
    config = SftConfig(assistant_turns="last")
    _, [[sample]] = prepare_sft(tokenizer, groups(TALK), config, limit=1000, vocabulary=260)
    trained = [token for token, chosen in zip(sample.ids, sample.mask, strict=True) if chosen]
    assert tokenizer.decode(trained) == "Bye<|im_end|>"
    with pytest.raises(BadRequest, match="Trajectory `1` ends with a `user` message"):
        prepare_sft(tokenizer, groups(TALK, TALK[:4]), config, limit=1000, vocabulary=260)


def test_a_last_choice_is_trained_with_the_tokens_that_were_sampled() -> None:
    """A recorded answer of the Responses API has no text here, only exact tokens."""
    tokenizer = Tokenizer(resolve("tiny-random"))
    choice = {"finish_reason": "stop", "message": {"role": "assistant", "content": ""}}
    ExactTokens([1, 2, 3], [*b"yes", 258], [-0.5] * 4).put(choice)
    config = SftConfig(assistant_turns="last")
    _, [[sample]] = prepare_sft(tokenizer, groups([choice]), config, limit=1000, vocabulary=260)
    assert sample.ids == [1, 2, 3, *b"yes", 258]
    assert sample.mask == [False] * 3 + [True] * 4


def test_a_token_that_the_model_does_not_have_is_rejected() -> None:
    tokenizer = Tokenizer(resolve("tiny-random"))
    token = {"token": "token_id:260", "logprob": -0.5}
    message = {"role": "assistant", "content": "yes"}
    choice = {"finish_reason": "stop", "message": message, "logprobs": {"content": [token]}}
    with pytest.raises(BadRequest, match="token id `260`, and the model has `260` tokens"):
        given = groups([TALK[1], choice])
        prepare_sft(tokenizer, given, SftConfig(), limit=1000, vocabulary=260)


def test_trajectories_without_assistant_messages_or_too_long_are_dropped_and_counted() -> None:
    tokenizer = Tokenizer(resolve("tiny-random"))
    talks = [TALK, TALK[:2], [*TALK, {"role": "assistant", "content": "x" * 500}], TALK, TALK]
    prepared, batches = prepare_sft(
        tokenizer, groups(*talks), SftConfig(), limit=300, vocabulary=260
    )
    assert [len(batch) for batch in batches] == [2, 1]
    assert prepared.metrics["data/dropped_no_trainable_tokens"] == 1
    assert prepared.metrics["data/dropped_too_long"] == 1


def test_too_few_learning_rates_are_rejected() -> None:
    tokenizer = Tokenizer(resolve("tiny-random"))
    config = SftConfig(learning_rate=(1e-3,), batch_size=1)
    with pytest.raises(BadRequest, match="`2` gradient steps"):
        prepare_sft(tokenizer, groups(TALK, TALK), config, limit=1000, vocabulary=260)


def test_a_schedule_may_end_at_zero_but_must_train_something() -> None:
    linear = (1e-3, 5e-4, 0.0)  # as `art.utils.sft.create_lr_schedule` makes it
    assert SftConfig(learning_rate=linear).rates(3) == list(linear)
    for refused in ((1e-3, -1e-9), (0.0, 0.0), (), 0.0):
        with pytest.raises(ValueError, match="must be above 0"):
            SftConfig(learning_rate=refused)


def test_the_loss_is_the_mean_cross_entropy_and_falls(tmp_path: Path) -> None:
    directory = resolve("tiny-random")
    learner = Learner("tiny-random", directory, dtype=torch.float32, device=torch.device("cpu"))
    lora, lesson = LoraConfig(), TALK[1:3]
    learner.prepare(tmp_path, lora)
    prompt = learner.tokenizer.apply_chat_template(lesson[:1])
    answer = learner.tokenizer.encode("Hello<|im_end|>")
    expected = -statistics.fmean(learner.score(tmp_path, 0, lora, prompt, answer))
    config = SftConfig(learning_rate=1e-2, batch_size=1)
    rows = list(learner.train(tmp_path, groups(lesson, lesson, lesson), config, lora))
    losses = [row["loss/train"] for row in rows[:-1]]
    assert losses[0] == pytest.approx(expected, abs=1e-5)
    assert losses == sorted(losses, reverse=True) and len(losses) == 3
    assert rows[-1]["step"] == 1
    after = -statistics.fmean(learner.score(tmp_path, 1, lora, prompt, answer))
    assert after < losses[-1]
