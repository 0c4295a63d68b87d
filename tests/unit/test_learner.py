"""Consecutive train calls on tiny-random: their results, their checkpoints and their errors."""

import errno
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kit.manifest import read_manifest, write_manifest
from tests.unit.tiny_learner import (
    END,
    LORA,
    files,
    groups,
    learner,
    train,
)
from trainer import checkpoint
from trainer.config import LoraConfig
from trainer.errors import CheckpointError, DiskFull, Diverged, OutOfMemory
from trainer.learner import gradient, state


def test_a_new_run_starts_at_a_fresh_lora(tmp_path: Path) -> None:
    assert learner().prepare(tmp_path, LORA) == 0
    tensors = load_file(tmp_path / "0000" / state.ADAPTER)
    assert len(tensors) == 4 * 7 * 2
    assert all(bool((value == 0).all()) for name, value in tensors.items() if "lora_B" in name)
    assert learner().prepare(tmp_path, LORA) == 0


def test_a_new_run_owes_nothing_to_the_run_before_it(tmp_path: Path) -> None:
    one = learner()
    train(one, tmp_path / "first", groups(0))
    base = one.state
    train(one, tmp_path / "second", groups(1))
    assert one.state is base, "the base model was loaded again"
    train(learner(), tmp_path / "alone", groups(1))
    for step in (0, 1):
        assert files(tmp_path / "second", step) == files(tmp_path / "alone", step)


def test_a_step_that_a_pull_replaces_is_read_again(tmp_path: Path) -> None:
    one = learner()
    train(one, tmp_path / "run", groups(0))
    train(learner(), tmp_path / "other", groups(1))
    shutil.rmtree(tmp_path / "run" / "0001")
    shutil.copytree(tmp_path / "other" / "0001", tmp_path / "run" / "0001")
    for at in ("run", "other"):
        train(one if at == "run" else learner(), tmp_path / at, groups(2))
    assert files(tmp_path / "run", 2) == files(tmp_path / "other", 2)


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


def test_a_run_begins_with_the_same_weights_if_the_base_model_was_loaded_before(
    tmp_path: Path,
) -> None:
    early, late = learner(), learner()
    early.load(LORA)
    loaded = early.state
    for one, name in ((early, "early"), (late, "late")):
        assert one.prepare(tmp_path / name, LORA) == 0
        train(one, tmp_path / name, groups(0))
    assert early.state is loaded  # and was not loaded again
    for step in (0, 1):
        found = [read_manifest(tmp_path / name / f"000{step}") for name in ("early", "late")]
        first, second = (it["files"] for it in found if it)
        assert first == second


def test_an_earlier_step_is_scored_with_its_own_weights_and_training_goes_on_unchanged(
    tmp_path: Path,
) -> None:
    scored, calm = learner(), learner()
    tokens: dict[str, Any] = {"prompt_ids": [97, 98], "completion_ids": [99, 100, END]}
    for step in (1, 2, 3):
        for one, name in ((scored, "scored"), (calm, "calm")):
            train(one, tmp_path / name, groups(step))
        now = scored.score(tmp_path / "scored", step, LORA, **tokens)
        before = scored.score(tmp_path / "scored", step - 1, LORA, **tokens)
        expected = learner().score(tmp_path / "calm", step - 1, LORA, **tokens)
        assert before == pytest.approx(expected) and before != pytest.approx(now)
    manifests = [read_manifest(tmp_path / name / "0003") for name in ("scored", "calm")]
    first, second = (it["files"] for it in manifests if it)
    assert first == second


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


def test_nothing_is_kept_of_a_step_that_diverges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(learner(), tmp_path / "good", groups(0))
    one = learner()
    with monkeypatch.context() as patch, pytest.raises(Diverged, match="`loss/train` is `nan`"):
        real = gradient.grpo_loss

        def broken(*arguments: Any) -> Any:
            output = real(*arguments)
            output.metrics["loss/train"] = torch.tensor(math.nan)
            return output

        patch.setattr(gradient, "grpo_loss", broken)
        train(one, tmp_path / "bad", groups(0))
    assert checkpoint.list_steps(tmp_path / "bad") == [0]
    train(one, tmp_path / "bad", groups(0))
    assert files(tmp_path / "bad", 1) == files(tmp_path / "good", 1)
