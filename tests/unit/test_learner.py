"""Consecutive train calls on tiny-random: their results, their checkpoints and their errors."""

import errno
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kit.manifest import read_manifest, sha256, write_manifest
from trainer import checkpoint
from trainer.base_model.resolve import resolve
from trainer.config import GrpoConfig, LoraConfig
from trainer.errors import BadRequest, CheckpointError, DiskFull, Diverged, OutOfMemory, Unsupported
from trainer.exact_tokens import ExactTokens, mark_ambiguous
from trainer.learner import gradient, state
from trainer.learner.learner import Learner

LORA = LoraConfig(rank=2, alpha=4)
END = 258


def learner(base_model: str = "tiny-random") -> Learner:
    return Learner(
        base_model, resolve("tiny-random"), dtype=torch.float32, device=torch.device("cpu")
    )


def trajectory(draw: random.Random, reward: float) -> dict[str, Any]:
    ids = [*(draw.randrange(97, 123) for _ in range(6)), END]
    tokens = [{"token": f"token_id:{one}", "logprob": -5.5, "top_logprobs": []} for one in ids]
    choice = {
        "finish_reason": "stop",
        "index": 0,
        "logprobs": {"content": tokens},
        "message": {"role": "assistant", "content": bytes(ids[:-1]).decode()},
    }
    question = {"role": "user", "content": "?"}
    return {"messages_and_choices": [question, choice], "tools": None, "reward": reward}


def groups(seed: int, count: int = 2) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    return [
        {"trajectories": [trajectory(draw, draw.random()) for _ in range(3)]} for _ in range(count)
    ]


def train(
    one: Learner,
    at: Path,
    given: list[dict[str, Any]],
    lora: LoraConfig | None = LORA,
    **config: Any,
) -> list[dict[str, Any]]:
    settings = {"packed_sequence_length": 96, "learning_rate": 1e-3, **config}
    return list(one.train(at, given, GrpoConfig(**settings), lora))


def files(at: Path, step: int) -> dict[str, str]:
    path = checkpoint.path_of(at, step)
    names = (state.ADAPTER, *map(state.OPTIMIZER.format, state.MOMENTS))
    return {name: sha256(path / name) for name in names}


def test_a_new_run_starts_at_a_fresh_lora(tmp_path: Path) -> None:
    assert learner().prepare(tmp_path, LORA) == 0
    tensors = load_file(tmp_path / "0000" / state.ADAPTER)
    assert len(tensors) == 4 * 7 * 2
    assert all(bool((value == 0).all()) for name, value in tensors.items() if "lora_B" in name)
    assert learner().prepare(tmp_path, LORA) == 0


def test_a_step_streams_a_row_per_gradient_step_and_ends_in_a_checkpoint(tmp_path: Path) -> None:
    *rows, last = train(learner(), tmp_path, [*groups(0, 4), {"trajectories": []}])
    assert set(last.pop("times")) == {"time/prepare_s", "time/gradient_s", "time/save_s"}
    assert last == {
        "checkpoint": str(tmp_path / "0001"),
        "step": 1,
        "dropped": [{"reason": "empty_group", "group": 4, "size": 0}],
    }
    assert len(rows) > 1
    for row in rows:
        assert row["num_gradient_steps"] == row["data/step_num_gradient_steps"] == len(rows)
        assert all(isinstance(value, float) and math.isfinite(value) for value in row.values())
        assert row["data/step_num_groups_submitted"] == 5
        assert row["data/step_num_groups_trainable"] == 4
        assert row["data/step_num_trajectories"] == 12
        assert row["data/step_trainer_tokens"] == 12 * 7
        assert row["data/step_packed_tokens"] < row["data/step_unshared_tokens"]
        assert row["loss/entropy"] == pytest.approx(5.4, abs=0.3)
        assert row["loss/learning_rate"] == 1e-3
        assert row["loss/grad_norm"] > 0
    manifest = checkpoint.verify(tmp_path / "0001")
    assert (manifest["parent"], manifest["base_model"]) == (0, "tiny-random")
    assert manifest["config"]["learning_rate"] == 1e-3


def test_the_same_seed_gives_bit_identical_checkpoints(tmp_path: Path) -> None:
    for run in ("one", "two"):
        one = learner()
        for step in range(2):
            train(one, tmp_path / run, groups(step))
    assert files(tmp_path / "one", 2) == files(tmp_path / "two", 2)
    assert files(tmp_path / "one", 1) != files(tmp_path / "one", 2)


def test_a_run_resumed_after_step_3_is_bit_identical_to_an_unbroken_one(tmp_path: Path) -> None:
    unbroken = learner()
    for step in range(5):
        train(unbroken, tmp_path / "unbroken", groups(step))
    first = learner()
    for step in range(3):
        train(first, tmp_path / "broken", groups(step))
    second = learner()
    for step in range(3, 5):
        train(second, tmp_path / "broken", groups(step))
    for step in range(6):
        assert files(tmp_path / "unbroken", step) == files(tmp_path / "broken", step)


def test_a_run_continues_from_a_checkpoint_with_one_optimizer_file(tmp_path: Path) -> None:
    for run in ("new", "old"):
        train(learner(), tmp_path / run, groups(0))
    path = checkpoint.path_of(tmp_path / "old", 1)
    tensors: dict[str, torch.Tensor] = {}
    for moment in state.MOMENTS:
        tensors |= load_file(path / state.OPTIMIZER.format(moment))
        (path / state.OPTIMIZER.format(moment)).unlink()
    save_file(tensors, path / "optimizer.safetensors")
    about = read_manifest(path)
    assert about
    write_manifest(path, {key: value for key, value in about.items() if key != "files"})
    for run in ("new", "old"):
        train(learner(), tmp_path / run, groups(1))
    assert files(tmp_path / "new", 2) == files(tmp_path / "old", 2)


def test_only_files_in_the_manifest_are_read(tmp_path: Path) -> None:
    for run in ("alone", "beside"):
        train(learner(), tmp_path / run, groups(0))
    path = checkpoint.path_of(tmp_path / "beside", 1)
    save_file({"generator": torch.zeros(9, dtype=torch.uint8)}, path / "optimizer.safetensors")
    for run in ("alone", "beside"):
        train(learner(), tmp_path / run, groups(1))
    assert files(tmp_path / "alone", 2) == files(tmp_path / "beside", 2)


def test_a_run_can_be_switched_and_forked(tmp_path: Path) -> None:
    one = learner()
    train(one, tmp_path / "a", groups(0))
    train(one, tmp_path / "b", groups(1))  # another run in between
    train(one, tmp_path / "a", groups(2))
    alone = learner()
    train(alone, tmp_path / "c", groups(0))
    checkpoint.fork(tmp_path / "c" / "0001", tmp_path / "d")
    train(alone, tmp_path / "d", groups(2))
    assert files(tmp_path / "a", 2) == files(tmp_path / "d", 2)


def test_a_damaged_checkpoint_is_skipped_and_trained_again(tmp_path: Path) -> None:
    one = learner()
    for step in range(2):
        train(one, tmp_path, groups(step))
    whole = files(tmp_path, 2)
    (tmp_path / "0002" / state.ADAPTER).write_bytes(b"damaged")
    *_, last = train(learner(), tmp_path, groups(1))
    assert last["step"] == 2
    assert files(tmp_path, 2) == whole


def test_groups_that_teach_nothing_advance_the_step_with_unchanged_weights(tmp_path: Path) -> None:
    draw = random.Random(0)
    same = {"trajectories": [trajectory(draw, 0.1) for _ in range(3)]}
    row, last = train(learner(), tmp_path, [same])
    assert row["data/step_num_groups_trainable"] == row["num_gradient_steps"] == 0
    assert row["data/dropped_equal_rewards"] == 1
    assert last["step"] == 1
    assert last["dropped"] == [{"reason": "equal_rewards", "group": 0, "size": 3}]
    assert files(tmp_path, 0) == files(tmp_path, 1)


def test_a_trajectory_that_cannot_be_trained_on_is_dropped_with_its_reason(tmp_path: Path) -> None:
    (group,) = groups(0, 1)
    none, no_logprobs, long = group["trajectories"]
    none["messages_and_choices"].pop()
    no_logprobs["messages_and_choices"][1]["logprobs"] = None
    long["messages_and_choices"][0]["content"] = "?" * 200
    row, last = train(learner(), tmp_path, [group])
    assert [drop["reason"] for drop in last["dropped"]] == [
        "no_trainable_tokens", "no_logprobs", "too_long",
    ]  # fmt: skip
    assert [drop["trajectory"] for drop in last["dropped"]] == [0, 1, 2]
    names = ("exact_prompts", "rendered_prompts", "choices_without_logprobs")
    assert [row[f"data/{name}"] for name in names] == [0, 0, 1]
    assert row["data/step_num_groups_trainable"] == 0
    allowed = train(learner(), tmp_path, [group], allow_training_without_logprobs=True)
    assert allowed[0]["data/step_num_groups_trainable"] == 1


def test_a_choice_that_is_left_out_of_a_trained_trajectory_is_counted(tmp_path: Path) -> None:
    given = groups(0)
    items = given[0]["trajectories"][0]["messages_and_choices"]
    items += [items[0], {**items[1], "logprobs": None}]
    row, last = train(learner(), tmp_path, given)
    assert row["data/choices_without_logprobs"] == 1 and not last["dropped"]


def test_a_step_says_how_many_prompts_were_exact_and_how_many_choices_constrained(
    tmp_path: Path,
) -> None:
    given = groups(0)
    items = [group["trajectories"][0]["messages_and_choices"][1] for group in given]
    for item, constrained in zip(items, (True, False), strict=True):
        ids = [int(token["token"][9:]) for token in item["logprobs"]["content"]]
        ExactTokens([1, 2], ids, [-5.5] * len(ids), constrained).put(item)
    mark_ambiguous(given[0]["trajectories"][1]["messages_and_choices"][1])
    row, last = train(learner(), tmp_path, given)
    assert last["dropped"] == [{"reason": "ambiguous", "group": 0, "trajectory": 1}]
    names = ("exact_prompts", "rendered_prompts", "ambiguous_choices", "constrained_share")
    assert [row[f"data/{name}"] for name in names] == [2, 3, 1, 0.2]
    assert row["data/retokenized"] == 0


@pytest.mark.parametrize("reward", [math.nan, math.inf, None, "1"])
def test_a_reward_that_is_not_a_number_is_rejected_and_the_next_step_is_trained(
    tmp_path: Path, reward: Any
) -> None:
    one = learner()
    given = groups(0)
    given[1]["trajectories"][2]["reward"] = reward
    with pytest.raises(BadRequest, match=f"Trajectory `2` of group `1` has the reward `{reward}`"):
        train(one, tmp_path, given)
    assert checkpoint.list_steps(tmp_path) == [0]
    assert train(one, tmp_path, groups(0))[-1]["step"] == 1


@pytest.mark.parametrize("token", [260, -1])
def test_a_token_of_another_model_is_rejected(tmp_path: Path, token: int) -> None:
    given = groups(0)
    content = given[0]["trajectories"][0]["messages_and_choices"][1]["logprobs"]["content"]
    content[2]["token"] = f"token_id:{token}"
    with pytest.raises(BadRequest, match=f"token id `{token}`, and the model has `260` tokens"):
        train(learner(), tmp_path, given)


def test_a_checkpoint_of_another_model_or_lora_is_rejected(tmp_path: Path) -> None:
    learner().prepare(tmp_path, LORA)
    with pytest.raises(CheckpointError, match="has the base model `tiny-random`, not `other`"):
        learner("other").prepare(tmp_path, LORA)
    with pytest.raises(CheckpointError, match="has the LoRA"):
        learner().prepare(tmp_path, LoraConfig(rank=4))


@pytest.mark.parametrize(
    ("failure", "named"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), DiskFull),
        (torch.OutOfMemoryError("CUDA out of memory"), OutOfMemory),
    ],
)
def test_a_failed_step_does_not_affect_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception, named: type[Exception]
) -> None:
    expected = learner()
    train(expected, tmp_path / "good", groups(0))
    one = learner()
    one.prepare(tmp_path / "bad", LORA)

    def fail(*_: Any, **__: Any) -> None:
        raise failure

    with monkeypatch.context() as patch, pytest.raises(named) as caught:
        # It fails after the gradient steps, when the weights in memory have changed.
        patch.setattr(state.State, "write", fail)
        train(one, tmp_path / "bad", groups(1))
    assert caught.value.hint
    assert checkpoint.list_steps(tmp_path / "bad") == [0]
    train(one, tmp_path / "bad", groups(0))
    assert files(tmp_path / "bad", 1) == files(tmp_path / "good", 1)


def test_a_step_that_diverges_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = learner()
    with monkeypatch.context() as patch, pytest.raises(Diverged, match="`loss/train` is `nan`"):
        real = gradient.grpo_loss

        def broken(*arguments: Any) -> Any:
            output = real(*arguments)
            output.metrics["loss/train"] = torch.tensor(math.nan)
            return output

        patch.setattr(gradient, "grpo_loss", broken)
        train(one, tmp_path, groups(0))
    assert train(one, tmp_path, groups(0))[-1]["step"] == 1


def adapter(at: Path, step: int = 1) -> dict[str, torch.Tensor]:
    return load_file(checkpoint.path_of(at, step) / state.ADAPTER)


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


def uneven_groups() -> list[dict[str, Any]]:
    """Groups whose trajectories differ in length, so that every kind of mean differs."""
    given = groups(0, 3)
    given[0]["trajectories"][0]["messages_and_choices"][1]["logprobs"]["content"].pop(0)
    given[1]["trajectories"][0]["messages_and_choices"][0]["content"] = "?" * 9
    return given


def test_the_reference_may_be_a_checkpoint(tmp_path: Path) -> None:
    one = learner()
    train(one, tmp_path, groups(0))
    reference = str(tmp_path / "0001")
    rows = train(one, tmp_path, groups(1, 1), kl_penalty_coef=0.1, kl_ref_adapter_path=reference)
    assert rows[0]["loss/kl_policy_ref"] == pytest.approx(0.0, abs=1e-6)
    (base, *_) = train(one, tmp_path, groups(1, 1), kl_penalty_coef=0.1)
    assert base["loss/kl_policy_ref"] != pytest.approx(0.0, abs=1e-6)


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
