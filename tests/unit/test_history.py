"""Logged trajectories and averages, in ART's files."""

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.errors import BadRequest
from trainer.runs import list_runs
from trainer.server import history


def group(*rewards: float, exceptions: int = 0, **metrics: float) -> dict[str, Any]:
    members = [{"reward": reward, "metrics": metrics} for reward in rewards]
    return {"trajectories": members, "exceptions": [{"type": "E"}] * exceptions}


def test_averages_match_arts() -> None:
    means = history.averages([group(0, 1, turns=2), group(3, exceptions=1)])
    assert means == {
        "reward": pytest.approx(4 / 3),
        "reward_std_dev": 0.5,  # of groups with more than one trajectory
        "exception_rate": 0.25,
        "turns": 2,
    }
    assert history.averages([]) == {"reward_std_dev": 0.0}


def test_a_second_log_in_a_step_adds_to_the_first(tmp_path: Path) -> None:
    for reward in (1.0, 2.0):
        history.log(tmp_path, 7, [group(reward)], "val")
    lines = (tmp_path / "trajectories" / "val" / "0007.jsonl").read_text().splitlines()
    assert [json.loads(line)["trajectories"][0]["reward"] for line in lines] == [1, 2]
    assert history.by_step(tmp_path)[7]["val/reward"] == 1.5


def test_a_truncated_line_is_skipped(tmp_path: Path) -> None:
    history.append(tmp_path, {"step": 1, "val/reward": 0.5})
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write('{"step": 2, "val/re\n')
    history.append(tmp_path, {"step": 3, "val/reward": 0.75})
    assert history.by_step(tmp_path) == {1: {"val/reward": 0.5}, 3: {"val/reward": 0.75}}


def test_groups_without_averages_are_not_stored(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="the reward `high`"):
        history.log(tmp_path, 0, [{"trajectories": [{"reward": "high"}]}], "val")
    assert list(tmp_path.iterdir()) == []


def test_smoothing_weights_earlier_steps(tmp_path: Path) -> None:
    for step, reward in enumerate([1.0, 0.0, 0.5]):
        history.append(tmp_path, {"step": step, "val/reward": reward, "other": 9})
    assert history.smoothed(tmp_path, "val/reward", 1.0) == {0: 1.0, 1: 0.0, 2: 0.5}
    # As polars' ewm_mean: (0.5 + 0.5 * 0 + 0.25 * 1) / (1 + 0.5 + 0.25).
    assert history.smoothed(tmp_path, "val/reward", 0.5)[2] == pytest.approx(0.75 / 1.75)
    assert history.smoothed(tmp_path, "nothing", 1.0) == {}
    with pytest.raises(BadRequest, match="`benchmark_smoothing`"):
        history.smoothed(tmp_path, "val/reward", 0)


def test_a_line_that_was_cut_off_does_not_swallow_the_next_one(tmp_path: Path) -> None:
    history.append(tmp_path, {"step": 1, "val/reward": 0.5})
    path = tmp_path / "history.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": 2, "val/re')
    history.append(tmp_path, {"step": 3, "val/reward": 0.75})
    assert history.by_step(tmp_path) == {1: {"val/reward": 0.5}, 3: {"val/reward": 0.75}}


def test_lines_of_other_bytes_are_counted_not_raised(tmp_path: Path) -> None:
    directory = tmp_path / "p" / "models" / "m"
    history.append(directory, {"step": 1, "train/reward": 0.5})
    path = directory / "history.jsonl"
    damage = b'\xff\xfe\0\n5\n[1]\n{"no": "step"}\n{"step": 2, "x": "text"}\n' + b"\0" * 9
    path.write_bytes(path.read_bytes() + damage)
    assert history.by_step(directory) == {1: {"train/reward": 0.5}, 2: {}}
    [run] = list_runs(tmp_path)
    assert run.summary()["reward"] == 0.5 and run.summary()["damaged_lines"] == 4
