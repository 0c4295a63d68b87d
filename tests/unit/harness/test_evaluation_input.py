"""Models, settings and results that `trainer eval` accepts, pins or refuses."""

import json
from pathlib import Path

import pytest

from tests.unit.harness.conftest import Endpoint, Project


def test_a_name_without_a_step_is_pinned_to_the_newest(project: Project) -> None:
    assert project.json("-m", "agent")["models"][0]["model"] == "agent@2"
    assert project.json("-m", "policy")["models"][0]["model"] == "agent@2"


def test_a_url_is_asked_with_the_key_of_the_environment(
    project: Project, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint.key, endpoint.served = "sesame", ["gpt"]
    endpoint.reply = lambda model, question, _: question
    error = project.error("-m", f"{endpoint.url}#gpt")
    assert "refused the key (401)" in error.message and "EVAL_API_KEY" in error.hint
    monkeypatch.setenv("EVAL_API_KEY", "sesame")
    (row,) = project.json("-m", f"{endpoint.url}#gpt")["models"]
    assert row["model"] == f"{endpoint.url}#gpt" and row["mean"] == 1
    assert "sesame" not in project.file.read_text()
    assert "There is no model `gtp`" in project.error("-m", f"{endpoint.url}#gtp").message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "agent@9"], "`agent` has no step 9 at"),
        (["-m", "nobody"], "There is no model `nobody` at"),
        (["-m", "tiny"], "`tiny` at `{url}` stands for whichever model was trained last"),
        (["-m", "http://127.0.0.1:9/v1#m"], "Cannot reach the endpoint `http://127.0.0.1:9/v1`"),
        (["-m", "{url}"], "`{url}` is not the URL of a model"),
        (["-m", "ftp://x#m"], "`ftp://x#m` is not the URL of a model"),
        (["-m", "http://me:secret@127.0.0.1:9/v1#m"], "holds a user name or password"),
        (["-m", "agent", "-m", "agent@2"], "The model `agent@2` is given twice"),
        (["--pass-at", "2"], "pass@2 needs at least 2 runs of every example"),
        (["--success", "1"], "`--success` is not used without `--pass-at`"),
        (["--pass-at", "1", "--success", "nan"], "`--success` must be a finite number"),
        (["--split", "eval"], "`--split eval` is not used"),
        (["--name", "../x"], "`../x` cannot name the results"),
        (["--validation_dataset", "none.json"], "Cannot read the dataset `none.json`"),
    ],
    ids=str,
)
def test_bad_input_is_told_in_one_sentence(
    project: Project, endpoint: Endpoint, arguments: list[str], message: str
) -> None:
    arguments = [text.replace("{url}", endpoint.url) for text in arguments]
    assert message.replace("{url}", endpoint.url) in project.error(*arguments).message
    assert not endpoint.bodies


def test_an_empty_dataset_is_refused(project: Project) -> None:
    project.write_questions(0)
    assert "is empty" in project.error("-m", "agent@1").message


def test_a_config_without_a_reward_is_refused(project: Project) -> None:
    project.config["eval"] = {}
    assert project.error("-m", "agent@1").message == (
        "`config.yml` cannot be evaluated: `eval.general.dataset` is required; "
        "`eval.evaluators` must define a reward"
    )


def test_other_settings_or_another_text_never_mix_with_earlier_results(project: Project) -> None:
    project.json("-m", "agent@1")
    project.config["llms"]["policy"]["temperature"] = 0.5
    assert "holds an evaluation with other settings: `sampling`" in (
        project.error("-m", "agent@1").message
    )
    del project.config["llms"]["policy"]["temperature"]
    (project.directory / "questions.json").write_text(
        json.dumps([{"id": "q1", "question": "2", "answer": "2"}])
    )
    assert "Example `q1` has changed" in project.error("-m", "agent@1").message
    assert project.json("-m", "agent@1", "--name", "other")["models"][0]["mean"] == 1


def test_a_directory_that_cannot_be_written_is_told(project: Project) -> None:
    (project.directory / "out").write_text("a file")
    assert "cannot be written" in project.error("-m", "agent@1").message


def test_results_go_to_the_run_where_its_directory_is_here(project: Project) -> None:
    backend = {"ip": "127.0.0.1", "port": 9, "name": "agent", "project": "p", "base_model": "tiny"}
    project.config["trainer_adapters"] = {
        "art": {"_type": "openpipe_art_trainer_adapter", "backend": backend}
    }
    project.config["finetuning"]["trainer_adapter"] = "art"
    (project.directory / ".art/p/models/agent").mkdir(parents=True)
    summary = project.json()  # the base model and the newest step
    assert [row["model"] for row in summary["models"]] == ["tiny@base", "agent@2"]
    assert summary["file"] == ".art/p/models/agent/evals/questions.jsonl"
    kinds = [json.loads(line)["kind"] for line in Path(summary["file"]).read_text().splitlines()]
    assert kinds == ["settings", *["run"] * 16, "summary"]
