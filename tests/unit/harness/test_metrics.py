"""Runs are written whatever the agent returned."""

import math
from pathlib import Path

import pytest

from trainer.harness.curriculum import CurriculumState
from trainer.harness.history import History, Pending
from trainer.harness.metrics import read_jsonl, write_jsonl
from trainer.harness.sampled_groups import Position
from trainer.harness.types import (
    EpisodeItem,
    EpisodeItemRole,
    Trajectory,
    TrajectoryCollection,
)


def test_an_output_that_is_not_json_is_written_as_text(tmp_path: Path) -> None:
    odd = {"answer": None, "error": ValueError("no such tool"), ("a", 1): {3}, "score": math.nan}
    write_jsonl(tmp_path / "runs.jsonl", [{"output": odd}])
    (row,) = read_jsonl(tmp_path / "runs.jsonl")
    written = {"answer": None, "error": "no such tool", "('a', 1)": "{3}", "score": None}
    assert row["output"] == written


@pytest.mark.parametrize("content", ["hello", "half \ud83d of a pair", "\u2028 \x00"])
def test_an_epoch_is_read_as_it_was_written(tmp_path: Path, content: str) -> None:
    choice = {"logprobs": {"content": [{"token": content, "logprob": -0.5, "bytes": [1]}]}}
    item = EpisodeItem(role=EpisodeItemRole.USER, content=content, metadata={"choice": choice})
    trajectory = Trajectory(episode=[item], reward=1.0, metrics={"turns": 2.0})
    collection = TrajectoryCollection(trajectories=[[trajectory]], run_id="id")
    curriculum = CurriculumState(0.5).as_json()
    pending = Pending(1, 0, {"avg_reward": 1.0}, collection, curriculum, Position(2, [1]))
    epochs = History(tmp_path, "id")
    epochs.begin_training(pending)
    assert epochs.interrupted() == [pending]
    epochs.epoch = 1
    epochs.end_training()
    epochs.epoch = 0
    assert epochs.interrupted() == []
