import json
from pathlib import Path
from typing import Any

import pytest

from trainer.doctor import examine
from trainer.errors import NotFound
from trainer.runs import find_run, list_runs

HEALTHY = {
    "num_gradient_steps": 1.0,
    "data/retokenized": 0.0,
    "data/step_num_trajectories": 8.0,
    "data/step_num_groups_submitted": 4.0,
    "data/step_num_groups_trainable": 4.0,
    "data/step_num_truncated": 0.0,
    "loss/sampler_kl": 0.001,
    "loss/learning_rate": 1e-5,
    "loss/entropy": 1.0,
    "loss/effective_sample_size": 0.98,
    "policy_age/mean": 1.0,
}
CANARY = {"canary/logprob_difference": 0.01, "canary/bound": 0.1}


def write(state: Path, name: str, *rows: dict[str, Any]) -> None:
    directory = state / "project" / "models" / name
    directory.mkdir(parents=True)
    (directory / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_healthy_run_has_no_findings(tmp_path: Path) -> None:
    write(tmp_path, "run", HEALTHY, CANARY)
    assert examine(find_run(tmp_path, None)) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data/retokenized": 4.0}, "0.50 choices per trajectory were not sampled"),
        ({"data/ambiguous_choices": 4.0}, "0.50 choices per trajectory have no certain prompt"),
        ({"data/choices_without_logprobs": 8.0}, "1.00 choices per trajectory came without log"),
        ({"data/dropped_equal_rewards": 3.0}, "Only 25% of the groups teach anything"),
        ({"data/step_num_truncated": 8.0}, "1.00 completions per trajectory were cut off"),
        ({"data/dropped_too_long": 2.0}, "25% of the trajectories are longer"),
        ({"loss/sampler_kl": 0.5}, "far from the policy"),
        (
            {"loss/effective_sample_size": 0.3, "policy_age/mean": 2.0},
            "2.0 steps old on average, count as 30% of their number",
        ),
        ({"loss/effective_sample_size": 0.9, "policy_age/mean": 6.0}, "tokens are 6.0 steps old"),
        ({"canary/logprob_difference": 1.0}, "Engine and learner differ by 1.00"),
        ({"loss/learning_rate": 1e-9}, "learning rate is 1.0e-09, too small"),
        ({"loss/entropy": 0.001}, "collapsed"),
    ],
)
def test_each_cause_is_named(tmp_path: Path, change: dict[str, float], message: str) -> None:
    write(tmp_path, "run", HEALTHY | change, CANARY | change)  # the two lines of a step
    (finding,) = examine(find_run(tmp_path, "run"))
    assert message in finding.problem and finding.hint


def test_the_likeliest_cause_comes_first(tmp_path: Path) -> None:
    bad = {"loss/learning_rate": 1e-9, "data/retokenized": 8.0}
    write(tmp_path, "run", HEALTHY | bad)
    first, second = examine(find_run(tmp_path, "project/run"))
    assert "were not sampled" in first.problem and "learning rate" in second.problem


def test_a_run_without_steps_and_a_missing_run_are_reported(tmp_path: Path) -> None:
    write(tmp_path, "new")
    (finding,) = examine(find_run(tmp_path, "new"))
    assert "has not trained a step yet" in finding.problem
    with pytest.raises(NotFound, match="no run `old`"):
        find_run(tmp_path, "old")
    assert [run.name for run in list_runs(tmp_path)] == ["new"]
