"""NVIDIA's guide as written: its YAML, its ports and every file it names."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.harness.conftest import write_project
from tests.environments import client_environment
from tests.serving import Serving

# "Basic Configuration", followed by the block of "Curriculum Learning".
GUIDE = """
llms:
  training_llm:
    _type: openai
    model_name: Qwen/Qwen2.5-3B-Instruct
    base_url: http://localhost:8000/v1  # ART inference endpoint
    api_key: default
    temperature: 0.4

workflow:
  _type: my_workflow
  llm: training_llm

eval:
  general:
    max_concurrency: 16
    output_dir: .tmp/nat/finetuning/eval
    dataset:
      _type: json
      file_path: data/training_data.json

  evaluators:
    my_reward:
      _type: my_custom_evaluator

trajectory_builders:
  art_builder:
    _type: openpipe_art_traj_builder
    num_generations: 2

trainer_adapters:
  art_adapter:
    _type: openpipe_art_trainer_adapter
    backend:
      ip: "localhost"
      port: 7623
      name: "my_training_run"
      project: "my_project"
      base_model: "Qwen/Qwen2.5-3B-Instruct"
      api_key: "default"
    training:
      learning_rate: 1e-6

trainers:
  art_trainer:
    _type: openpipe_art_trainer

finetuning:
  enabled: true
  trainer: art_trainer
  trajectory_builder: art_builder
  trainer_adapter: art_adapter
  reward_function:
    name: my_reward
  num_epochs: 20
  output_dir: .tmp/nat/finetuning/output
  curriculum_learning:
    enabled: true
    initial_percentile: 0.3      # Start with easiest 30%
    increment_percentile: 0.2     # Add 20% each expansion
    expansion_interval: 5         # Expand every 5 epochs
    min_reward_diff: 0.1         # Filter no-variance groups
    sort_ascending: false         # Easy-to-hard
"""
FILLED_IN = {
    "_type: my_workflow": "_type: python\n  function: agent:answer",
    "_type: my_custom_evaluator": "_type: python\n      function: agent:length",
    "Qwen/Qwen2.5-3B-Instruct": "tiny-random",
}


def test_the_guide_runs_as_written_on_its_ports(tmp_path: Path, art_cache: str) -> None:
    for port in (7623, 8000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                pytest.skip(f"port {port}, which the guide uses, is taken on this machine")
    write_project(tmp_path)
    text = GUIDE
    for theirs, ours in FILLED_IN.items():
        assert theirs in text
        text = text.replace(theirs, ours)
    (tmp_path / "config.yml").write_text(text)
    served = tmp_path / "server"
    with Serving(served, "tiny-random", port=7623, openai_port=8000, ART_CACHE=art_cache) as server:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "trainer", "finetune", "--config_file=config.yml"),
                *("-o", "finetuning.num_epochs", "2"),
            ],
            cwd=tmp_path,
            env=client_environment(),
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    output = tmp_path / ".tmp/nat/finetuning/output"
    rows = [
        json.loads(line) for line in (output / "training_metrics.jsonl").read_text().splitlines()
    ]
    assert [(row["epoch"], row["num_trajectories"]) for row in rows] == [(1, 8), (2, 8)]
    assert all(0 <= row["min_reward"] <= row["max_reward"] <= 1 for row in rows)
    assert any(row.get("loss/grad_norm", 0) > 0 for row in rows)
    rewards = json.loads((output / "reward_history.json").read_text())
    assert [entry["avg_reward"] for entry in rewards] == [row["avg_reward"] for row in rows]
    assert json.loads((output / "curriculum_state.json").read_text())["current_percentile"] == 0.3
    assert (output / "reward_plot.png").read_bytes().startswith(b"\x89PNG")
    evaluated = sorted(path.name for path in (tmp_path / ".tmp/nat/finetuning/eval").iterdir())
    assert evaluated == ["epoch_0001.jsonl", "epoch_0002.jsonl"]
    steps = server.state / "my_project" / "models" / "my_training_run" / "checkpoints"
    assert max(path.name for path in steps.iterdir()) == f"{rows[-1]['step']:04d}"
    assert "Avg Reward" in done.stderr and "Completed epoch 2/2" in done.stderr
