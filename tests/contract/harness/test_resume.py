"""Killing the harness loses no epoch and trains none twice."""

import re
import signal
import subprocess
from typing import Any

import httpx
import pytest

EPOCHS = ("-o", "finetuning.num_epochs", "5")


def stop_at(project: Any, line: str, times: int, how: signal.Signals = signal.SIGKILL) -> int:
    """Start training, signal it when `line` has appeared `times` times; return its exit code."""
    process = subprocess.Popen(
        project.command(*EPOCHS), cwd=project.directory, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr
    with process.stderr:
        for output in process.stderr:
            times -= line in output
            if not times:
                process.send_signal(how)
                break
        rest = process.stderr.read()
    code = process.wait(120)
    assert "Traceback" not in rest
    return code


def step_of(server: Any, project: Any) -> int:
    backend = project.config["trainer_adapters"]["art_adapter"]["backend"]
    model = {"name": backend["name"], "project": backend["project"]}
    return int(httpx.post(f"{server.control}/_get_step", json=model, timeout=60).json())


@pytest.mark.parametrize("line", ["Starting epoch 3", "Submitted"], ids=["sampling", "training"])
def test_a_killed_run_resumes_and_trains_no_epoch_twice(
    project: Any, server: Any, line: str
) -> None:
    assert stop_at(project, line, 1 if "epoch" in line else 3) == -signal.SIGKILL
    before = project.read("reward_history.json")[:2]  # the signal may arrive late
    assert [row["epoch"] for row in before] == [1, 2]
    output = project.finetune("--resume", *EPOCHS).stderr
    assert "INFO - Resuming run" in output and re.search("after epoch [2-4]", output)
    rewards = project.read("reward_history.json")
    assert [row["epoch"] for row in rewards] == [1, 2, 3, 4, 5]
    assert rewards[:2] == before
    metrics = project.read("training_metrics.jsonl")
    assert [row["epoch"] for row in metrics] == [1, 2, 3, 4, 5]
    assert len({row["run_id"] for row in metrics}) == 1
    assert step_of(server, project) == metrics[-1]["step"] == 5
    # A finished run is not trained again.
    again = project.finetune("--resume", *EPOCHS).stderr
    assert "Starting epoch" not in again and step_of(server, project) == 5


def test_ctrl_c_stops_cleanly_and_the_run_can_be_resumed(project: Any) -> None:
    assert stop_at(project, "Submitted", 2, signal.SIGINT) == 130
    project.finetune("--resume", "-o", "finetuning.num_epochs", "2")
    assert [row["epoch"] for row in project.read("reward_history.json")][:2] == [1, 2]


def test_a_new_run_keeps_the_files_of_the_previous_one(project: Any) -> None:
    project.finetune("-o", "finetuning.num_epochs", "1")
    first = project.read("training_metrics.jsonl")[0]["run_id"]
    output = project.finetune("-o", "finetuning.num_epochs", "1").stderr
    assert f"previous/{first}" in output
    assert (project.output / "previous" / first / "training_metrics.jsonl").is_file()
    (row,) = project.read("training_metrics.jsonl")
    assert row["run_id"] != first and row["step"] == 2
