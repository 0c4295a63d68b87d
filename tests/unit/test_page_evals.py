"""Evaluations on the page: files that are whole, go on, are damaged, or hold hostile texts."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.page_run import write_eval, write_run
from kit.state_dir import EVALS
from trainer.errors import NotFound
from trainer.page import eval_answers, evals
from trainer.page.reader import Run, Runs
from trainer.page.report import write_report

ATTACK = "<script>alert(1)</script>"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run("demo", "synthetic", write_run(tmp_path, steps=1, attempts=4, generations=4))


def rows(run: Run) -> Any:
    """The evaluations as JSON, which has no NaN."""
    found = eval_answers.Evals.model_validate(evals.evals(run)).model_dump_json()
    return json.loads(found)["evals"]


def line(model: str, id: str, reward: Any, generation: int = 0, **more: Any) -> str:
    row = {"kind": "run", "model": model, "id": id, "generation": generation, "reward": reward}
    return json.dumps({**row, "metrics": {}, "failure": None, "output": "x", **more}) + "\n"


def write(run: Run, name: str, *lines: str) -> Path:
    path = run.directory / EVALS / f"{name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")
    return path


def test_an_evaluation_has_the_numbers_of_the_command(run: Run) -> None:
    write_eval(run.directory, "val", examples=20, generations=4)
    (found,) = rows(run)
    assert found["name"] == "val" and found["finished"] and found["missing"] == []
    assert (found["examples"], found["num_generations"]) == (20, 4)
    base, trained = found["models"]
    assert base["paired"] is None and [one["k"] for one in base["pass_at"]] == [1, 4]
    assert trained["paired"]["against"] == base["model"] and trained["paired"]["clear"]
    low, high = trained["paired"]["interval"]
    assert low < trained["paired"]["difference"] < high
    assert sum(trained["lost"].values()) == 1 and trained["runs"] == 79


def test_examples_and_attempts_are_paged_and_keep_their_texts(run: Run) -> None:
    write_eval(run.directory, "val", examples=20, generations=4)
    found = evals.eval_examples(run, "val", limit=5)
    assert found["total"] == 20 and len(found["rows"]) == 5 and len(found["models"]) == 2
    sizes = [abs(row["difference"]) for row in found["rows"]]
    assert sizes == sorted(sizes, reverse=True)
    example = found["rows"][0]["example"]
    attempts = evals.eval_attempts(run, "val", example, offset=2, limit=3)
    assert attempts["total"] == 8
    assert [it["number"] for it in attempts["attempts"]] == [1, 1, 2]
    eval_answers.EvalAttempts.model_validate(attempts)
    with pytest.raises(NotFound):
        evals.eval_examples(run, "../x")
    with pytest.raises(NotFound):
        evals.eval_attempts(run, "val", "none")


def test_an_evaluation_that_goes_on_shows_what_it_has(run: Run) -> None:
    path = write(run, "val", line("base", "a", 0.0), line("base", "b", 1.0))
    (found,) = rows(run)
    assert not found["finished"] and found["models"][0]["mean"] == 0.5
    with path.open("a") as file:
        file.write(line("base", "a", 1.0) + line("agent@2", "a", 1.0) + '{"kind": "ru')
    (found,) = rows(run)
    assert [(one["model"], one["mean"]) for one in found["models"]] == [
        ("base", 1.0),  # the newest line of a run counts
        ("agent@2", 1.0),
    ]
    assert found["missing"] == ["The last line of `evals/val.jsonl` is not complete"]


def test_damaged_lines_are_named_and_the_rest_is_shown(run: Run) -> None:
    write(
        run,
        "val",
        "not json\n[1]\n{}\n",
        '{"kind": "run", "model": "m"}\n',
        line("m", "g", 1.0).replace('"generation": 0', '"generation": Infinity'),
        line("m", "f", 1.0, failure=[1]),
        line("m", "n", float("nan")),
        line("m", "big", 10**400),
        line("m", "a", 0.5, metrics={"odd": float("inf"), "text": "x"}),
        line("m", ATTACK, 1.0, output="half \ud83d of a character"),
        '{"kind": "summary", "models": [{"pass_at": 3}, 4], "success_reward": "x"}\n',
    )
    write(run, "empty")
    (run.directory / EVALS / "folder.jsonl").mkdir()
    found = {one["name"]: one for one in rows(run)}
    assert set(found) == {"val", "empty", "folder"}
    assert found["val"]["missing"] == [
        "Left out of `evals/val.jsonl`: 6 lines that cannot be read",
        "Left out of `evals/val.jsonl`: 2 runs without a finite reward",
    ]
    (model,) = found["val"]["models"]
    assert model["mean"] == 0.75 and model["runs"] == 2
    for name in ("empty", "folder"):
        assert found[name]["missing"] == [f"`evals/{name}.jsonl` holds no run that can be read"]
    (attempt,) = evals.eval_attempts(run, "val", ATTACK)["attempts"]
    assert attempt["output"] == "half ? of a character"
    eval_answers.EvalAttempt.model_validate(attempt).model_dump_json()


def test_rewards_that_no_longer_fit_pass_at_k_are_told(run: Run) -> None:
    path = write_eval(run.directory, "val", examples=4, generations=4)
    with path.open("a") as file:
        file.write(line("agent@2", "val-000", 0.5))
    (found,) = rows(run)
    assert "pass@k needs rewards of 0 or 1" in found["missing"][0]
    assert found["models"][0]["pass_at"] == [] and found["models"][0]["mean"] is not None


def test_an_output_directory_with_evaluations_can_be_viewed(tmp_path: Path) -> None:
    write_eval(tmp_path / "out", "val", examples=4)
    (run,) = Runs(tmp_path / "out").all()
    assert run.name == "out" and rows(run)[0]["examples"] == 4


def test_the_report_has_the_evaluations(run: Run, tmp_path: Path) -> None:
    write_eval(run.directory, "val", examples=20, generations=4)
    write(run, "odd", line(ATTACK, "a", 0.5), "broken\n")
    text = write_report(run.directory, tmp_path / "report.html").read_text()
    assert "Evaluations" in text and "agent@2" in text and "pass@4" in text
    assert "Left out of `evals/odd.jsonl`: 1 line that" in text
    assert ATTACK not in text and "&lt;script&gt;" in text
