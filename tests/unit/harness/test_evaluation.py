"""`trainer eval` measures and compares models, against a scripted OpenAI endpoint."""

import io
import json

import pytest
from rich.console import Console

from tests.unit.harness.conftest import Endpoint, Project
from trainer.harness.evaluation.table import show
from trainer.page.evals import eval_attempts
from trainer.page.reader import Run

ALL = ("-m", "tiny@base", "-m", "agent@1", "-m", "agent@2")


def test_models_are_measured_and_compared_with_the_first_by_example(project: Project) -> None:
    summary = project.json(*ALL)
    assert [row["model"] for row in summary["models"]] == ["tiny@base", "agent@1", "agent@2"]
    assert [row["mean"] for row in summary["models"]] == [0, 0.75, 1]
    base, first, _ = summary["models"]
    assert base["paired"] is None and base["interval"] is None
    assert first["interval"][0] < 0.75 < first["interval"][1]
    assert first["paired"]["against"] == "tiny@base" and first["paired"]["examples"] == 8
    assert first["paired"]["difference"] == 0.75 and first["paired"]["clear"]
    assert (first["paired"]["better"], first["paired"]["worse"]) == (6, 0)
    assert "Student's t" in summary["interval_method"]


def test_no_model_is_asked_for_logprobs(project: Project, endpoint: Endpoint) -> None:
    project.json("-m", "agent@2")
    assert all("logprobs" not in body for body in endpoint.bodies)


def test_the_table_says_who_is_better_and_why(project: Project) -> None:
    result = project.run(*ALL)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split()[:3] == ["model", "reward", "95"]
    first, second = (
        line.split() for line in lines if line.startswith("agent@1 ") and "0.7" in line
    )
    assert first[1] == "0.750" and first[-2:] == ["8", "0"]
    assert second[1] == "+0.750" and second[-3:] == ["6", "0", "2"]
    assert "agent@1 is better than tiny@base on 8 examples: the interval excludes 0." in lines
    same = "the difference is the same on all 8"
    assert f"agent@2 is better than tiny@base on 8 examples: {same}." in lines
    assert "Results: out/evals/questions.jsonl" in result.stderr


def test_the_same_difference_on_few_examples_is_not_clear(project: Project) -> None:
    lines = project.run("-m", "tiny@base", "-m", "agent@2", "--examples", "5").stdout.splitlines()
    same = "the difference is the same on all 5, but they are too few"
    assert f"agent@2: no clear difference to tiny@base on 5 examples: {same}." in lines


def test_models_that_score_the_same_have_no_clear_difference(
    project: Project, endpoint: Endpoint
) -> None:
    endpoint.reply = lambda model, question, number: question
    lines = project.run("-m", "tiny@base", "-m", "agent@2").stdout.splitlines()
    assert "agent@2: no clear difference to tiny@base on 8 examples." in lines


@pytest.mark.parametrize("width", [80, 200])
def test_the_tables_fit_a_terminal(project: Project, width: int) -> None:
    file = io.StringIO()
    summary = project.json(*ALL)
    summary["models"][1]["model"] = "[red]" + "long/" * 20
    summary["models"][1]["pass_at"] = summary["models"][0]["pass_at"] = []
    show(summary, Console(file=file, width=width, force_terminal=True, color_system=None))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert any(line.startswith("[red]long/") and "0.750" in line for line in lines)
    assert not any("…" in line for line in lines)


def test_pass_at_k_comes_from_several_runs(project: Project, endpoint: Endpoint) -> None:
    endpoint.reply = lambda model, question, number: question if number % 4 == 1 else "?"
    summary = project.json(
        "-m", "agent@1", "--num_generations", "4", "--pass-at", "2", "--pass-at", "1"
    )
    (row,) = summary["models"]
    assert row["runs"] == 32 and summary["success"] == "reward is 1"
    assert [(one["k"], one["mean"], one["examples"]) for one in row["pass_at"]] == [
        (1, 0.25, 8),
        (2, 0.5, 8),
    ]


def test_rewards_other_than_0_and_1_need_a_threshold_and_the_runs_are_kept(
    project: Project, endpoint: Endpoint
) -> None:
    project.config["eval"]["evaluators"]["right"] = {
        "_type": "python",
        "function": "eval_agent:partly",
    }
    error = project.error("-m", "agent@1", "--pass-at", "1")
    assert error.message == "pass@k needs rewards of 0 or 1, and example `q2` has `0.5`"
    assert "--success" in error.hint
    summary = project.json("-m", "agent@1", "--pass-at", "1", "--success", "0.5")
    assert summary["models"][0]["pass_at"][0]["mean"] == 0.75
    assert sum(endpoint.calls.values()) == 8


def test_a_second_call_runs_only_what_is_missing(project: Project, endpoint: Endpoint) -> None:
    project.json("-m", "agent@1", "--examples", "3")
    with project.file.open("a") as file:
        file.write('{"kind": "run", "model": "agent@1", "id"')  # killed while it was writing
    summary = project.json("-m", "agent@1", "-m", "agent@2")
    assert [row["mean"] for row in summary["models"]] == [0.75, 1]
    assert set(endpoint.calls.values()) == {1} and len(endpoint.calls) == 16
    project.json("-m", "agent@1", "--fresh")
    assert endpoint.calls["agent@1", "0"] == 2


def test_lost_runs_are_counted_by_reason_and_run_again_later(
    project: Project, endpoint: Endpoint
) -> None:
    endpoint.reply = lambda model, question, number: 400 if question == "5" else question
    summary = project.json("-m", "agent@1")
    (row,) = summary["models"]
    assert row["lost"] == {"workflow_failed": 1} and row["runs"] == 7 and row["mean"] == 1
    table = project.run("-m", "agent@1").stdout
    assert "agent@1: 1 run was lost (workflow_failed) and not counted." in table
    endpoint.reply = lambda model, question, number: question
    (row,) = project.json("-m", "agent@1")["models"]
    assert row["lost"] == {} and row["runs"] == 8
    assert endpoint.calls["agent@1", "5"] == 3 and endpoint.calls["agent@1", "4"] == 1


def test_a_model_without_any_reward_ends_with_exit_code_1(
    project: Project, endpoint: Endpoint
) -> None:
    endpoint.reply = lambda *_: 400
    result = project.run("-m", "agent@1")
    assert result.exit_code == 1
    assert "No run of `agent@1` has a reward" in result.stderr


def test_the_reason_of_an_evaluator_is_in_the_records_and_on_the_page(project: Project) -> None:
    project.config["eval"]["evaluators"]["right"] = {
        "_type": "python",
        "function": "eval_agent:explained",
    }
    project.json("-m", "agent@1", "--examples", "3")
    rows = [json.loads(line) for line in project.file.read_text().splitlines()]
    reasons = {row["id"]: row["reasons"] for row in rows if row["kind"] == "run"}
    assert reasons == {"q0": {"right": "I read <?>"}, "q1": {"right": "I read <?>"}} | {
        "q2": {"right": "I read <2>"}
    }
    found = eval_attempts(Run("p", "n", project.directory / "out"), "questions", "q2")
    assert found["attempts"][0]["judge"] == [{"name": "right", "reason": "I read <2>"}]
