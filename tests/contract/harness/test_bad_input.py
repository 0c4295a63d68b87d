"""What can go wrong is said in a sentence, counted, and ends the run or not as the user set it."""

import json
from typing import Any

import pytest

SHORT = ("-o", "finetuning.num_epochs", "1")


def agent(project: Any, code: str) -> None:
    path = project.directory / "agent.py"
    path.write_text(path.read_text() + code)


def evaluator(project: Any, body: str) -> None:
    agent(project, f"\n\ndef mine(run):\n    {body}\n")
    project.config["eval"]["evaluators"]["my_reward"]["function"] = "agent:mine"


def told(result: Any, says: str) -> None:
    assert says in result.stderr, result.stderr
    *_, last = result.stderr.split("error: ")
    message, _, hint = last.partition("\n\nhint: ")
    assert message.strip() and hint.strip()


def test_a_backend_that_is_down_is_told(project: Any) -> None:
    project.config["trainer_adapters"]["art_adapter"]["backend"]["port"] = 9
    told(project.finetune(*SHORT, code=1), "Failed to connect to ART backend")


def test_another_base_model_than_the_servers_is_told(project: Any) -> None:
    project.config["trainer_adapters"]["art_adapter"]["backend"]["base_model"] = "gpt-x"
    told(project.finetune(*SHORT, code=1), "This server holds `tiny-random`, not `gpt-x`")


def test_a_misspelt_setting_is_told_before_anything_runs(project: Any) -> None:
    project.config["finetuning"]["num_epoch"] = 3
    told(project.finetune(code=1), "did you mean `num_epochs`?")


def test_a_function_that_is_not_there_is_told(project: Any) -> None:
    project.config["workflow"]["function"] = "agent:anser"
    told(project.finetune(*SHORT, code=1), "Module `agent` has no `anser`")


def test_a_dataset_with_a_broken_line_is_told(project: Any) -> None:
    (project.directory / "data/training_data.json").write_text(
        '{"id": 1, "question": "a"}\n{"id"\n'
    )
    told(project.finetune(*SHORT, code=1), "line 2: not valid JSON")


def test_runs_that_fail_are_counted_and_the_rest_is_trained_on(project: Any) -> None:
    agent(
        project,
        "\n\nasync def fragile(example, llm):\n"
        "    if example.id == '1':\n"
        "        raise ValueError('the tool is gone')\n"
        "    if example.id == '2':\n"
        "        await asyncio.sleep(60)\n"
        "    return await answer(example, llm)\n",
    )
    project.config["workflow"]["function"] = "agent:fragile"
    project.config["eval"]["general"]["run_timeout"] = 15
    result = project.finetune(*SHORT)
    (row,) = project.read("training_metrics.jsonl")
    assert row["failures"] == {"workflow_failed": 2, "workflow_timed_out": 2}
    assert row["num_groups"] == 2 and row["step"] == 1
    assert "2 runs were lost (workflow_failed), the first on example `1`: ValueError: the tool" in (
        result.stderr
    )
    assert "the workflow took longer than 15 s" in result.stderr


def test_a_failed_run_ends_everything_when_the_user_wants_it(project: Any) -> None:
    evaluator(project, "return 'good'")
    project.config["eval"]["general"]["on_failure"] = "stop"
    result = project.finetune(*SHORT, code=1)
    told(result, "Evaluator `my_reward`, example")
    assert "it gave `'good'`, not a finite number" in result.stderr


def test_equal_rewards_end_with_exit_1_and_the_reason(project: Any) -> None:
    evaluator(project, "return 1.0")
    result = project.finetune(code=1)
    told(result, "Nothing to train on in 3 epochs: 4 groups: equal_rewards")
    assert [row["epoch"] for row in project.read("reward_history.json")] == [1, 2, 3]
    assert "Completed epoch 4" not in result.stderr


def test_an_evaluator_that_always_gives_nan_ends_with_exit_1_and_the_reason(project: Any) -> None:
    evaluator(project, "return float('nan')")
    result = project.finetune(code=1)
    told(result, "Nothing to train on in 3 epochs: 8 runs: evaluator_failed")
    assert "No trajectories collected for epoch 1" in result.stderr


def test_finetuning_that_is_not_enabled_does_nothing(project: Any) -> None:
    project.config["finetuning"]["enabled"] = False
    result = project.finetune()
    assert "Finetuning is not enabled" in result.stderr and not project.output.exists()


def test_the_result_is_data_when_asked_for(project: Any) -> None:
    result = json.loads(project.finetune("--json", *SHORT).stdout)
    assert result["epochs"] == 1 and len(result["rewards"]) == 1
    assert result["statuses"][0]["status"] == "completed"


@pytest.mark.parametrize(("target", "trained"), [("act", 4), ("nobody", 0)])
def test_only_the_target_functions_calls_are_trained_on(
    project: Any, target: str, trained: int
) -> None:
    agent(
        project,
        "\n\nasync def parts(example, llm):\n"
        "    plan = await llm.named('plan').ask('Plan: ' + example.question, max_tokens=4)\n"
        "    return await llm.named('act').ask(plan + example.question, max_tokens=4)\n",
    )
    project.config["workflow"]["function"] = "agent:parts"
    project.config["finetuning"]["target_functions"] = [target]
    project.finetune(*SHORT)
    (row,) = project.read("training_metrics.jsonl")
    assert row["num_groups"] == trained
    assert row["failures"] == ({} if trained else {"no_calls": 8})
    if trained:
        # One call of at most four tokens a trajectory, not two.
        assert row["data/step_trainer_tokens"] <= 4 * row["data/step_num_trajectories"]
