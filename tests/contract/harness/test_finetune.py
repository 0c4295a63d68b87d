"""`trainer finetune` against a real `trainer serve`: the guide's YAML, files and log lines."""

import json
import re
from typing import Any

import pytest

CURRICULUM = {
    "enabled": True,
    "initial_percentile": 0.3,
    "increment_percentile": 0.2,
    "expansion_interval": 5,
    "min_reward_diff": 0.01,
    "sort_ascending": False,
}


def test_the_guides_yaml_trains_and_writes_every_file_the_guide_names(
    project: Any, server: Any
) -> None:
    project.config["finetuning"]["curriculum_learning"] = CURRICULUM
    backend = project.config["trainer_adapters"]["art_adapter"]["backend"]
    backend["delete_old_checkpoints"] = True
    result = project.finetune(
        *("--validation_dataset=data/val.json", "--validation_interval=1"),
        *("-o", "finetuning.num_epochs", "2"),
    )
    metrics = project.read("training_metrics.jsonl")
    assert [row["epoch"] for row in metrics] == [1, 2]
    assert [row["step"] for row in metrics] == [1, 2]
    for row in metrics:
        assert row["num_trajectories"] == 8 and row["num_groups"] == 4
        assert 1 <= row["filtered_groups"] <= 2
        assert row["min_reward"] <= row["avg_reward"] <= row["max_reward"]
        assert row["data/step_num_groups_trainable"] == row["filtered_groups"]
        assert row["data/retokenized"] == 0
        assert row["loss/grad_norm"] > 0
    rewards = project.read("reward_history.json")
    assert [r["avg_reward"] for r in rewards] == [row["avg_reward"] for row in metrics]
    assert [row["epoch"] for row in project.read("validation_history.json")] == [0, 1, 2]
    assert project.read("curriculum_state.json")["current_percentile"] == 0.3
    assert (project.output / "reward_plot.png").read_bytes().startswith(b"\x89PNG")
    runs = sorted(path.name for path in (project.directory / ".tmp/nat/finetuning/eval").iterdir())
    assert runs == [
        "epoch_0001.jsonl", "epoch_0002.jsonl",
        "validation_0000.jsonl", "validation_0001.jsonl", "validation_0002.jsonl",
    ]  # fmt: skip
    model = server.state / "harness" / "models" / backend["name"]
    # The server records the validation rewards with its own metrics.
    history = [json.loads(line) for line in (model / "history.jsonl").read_text().splitlines()]
    recorded = [(row["step"], row["val/reward"]) for row in history if "val/reward" in row]
    validation = project.read("validation_history.json")
    assert recorded == [(step, pytest.approx(validation[step]["avg_reward"])) for step in range(3)]
    assert [row["step"] for row in history if "train/reward" in row] == [1, 2]
    # Before step 2, all checkpoints except the newest were deleted.
    assert sorted(path.name for path in (model / "checkpoints").iterdir()) == ["0001", "0002"]
    run_id = metrics[0]["run_id"]
    for line in (
        f"INFO - Starting epoch 1 for run {run_id}",
        f"INFO - Starting 2 evaluation runs for run_id: {run_id}",
        f"INFO - Built 8 trajectories across 4 examples for run_id: {run_id}",
        f"INFO - Epoch 1 progress logged - Avg Reward: {metrics[0]['avg_reward']:.4f}, "
        "Trajectories: 8",
        f"INFO - Training {run_id} completed successfully.",
        "INFO - Completed epoch 1/2",
        "INFO - Completed epoch 2/2",
    ):
        assert line in result.stderr.splitlines(), result.stderr
    # Groups with equal rewards are submitted too.
    submitted = re.search(r"INFO - Submitted (\d+) trajectories in (\d+) groups", result.stderr)
    assert submitted and int(submitted[2]) >= metrics[0]["filtered_groups"], result.stderr
