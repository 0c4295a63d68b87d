"""Errors have a message and a hint. Failed runs are counted, or stop the training if so set."""

import json
from typing import Any

import pytest

SHORT = ("-o", "finetuning.num_epochs", "1")


def add_code(project: Any, code: str) -> None:
    path = project.directory / "agent.py"
    path.write_text(path.read_text() + code)


def set_reward(project: Any, body: str) -> None:
    add_code(project, f"\n\ndef mine(run):\n    {body}\n")
    project.config["eval"]["evaluators"]["my_reward"]["function"] = "agent:mine"


def check_error(result: Any, expected: str) -> None:
    assert expected in result.stderr, result.stderr
    *_, last = result.stderr.split("error: ")
    message, _, hint = last.partition("\n\nhint: ")
    assert message.strip() and hint.strip()


def test_a_backend_that_is_down(project: Any) -> None:
    project.config["trainer_adapters"]["art_adapter"]["backend"]["port"] = 9
    check_error(project.finetune(*SHORT, code=1), "Failed to connect to ART backend")


def test_a_base_model_other_than_the_servers(project: Any) -> None:
    project.config["trainer_adapters"]["art_adapter"]["backend"]["base_model"] = "gpt-x"
    check_error(project.finetune(*SHORT, code=1), "This server holds `tiny-random`, not `gpt-x`")


def test_a_misspelt_setting(project: Any) -> None:
    project.config["finetuning"]["num_epoch"] = 3
    check_error(project.finetune(code=1), "did you mean `num_epochs`?")


def test_a_function_that_does_not_exist(project: Any) -> None:
    project.config["workflow"]["function"] = "agent:anser"
    check_error(project.finetune(*SHORT, code=1), "Module `agent` has no `anser`")


def test_a_dataset_with_a_broken_line(project: Any) -> None:
    (project.directory / "data/training_data.json").write_text(
        '{"id": 1, "question": "a"}\n{"id"\n'
    )
    check_error(project.finetune(*SHORT, code=1), "line 2: not valid JSON")


def test_failed_runs_are_counted_and_the_others_are_trained_on(project: Any) -> None:
    add_code(
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


def test_a_failed_run_stops_the_training_with_on_failure_stop(project: Any) -> None:
    set_reward(project, "return 'good'")
    project.config["eval"]["general"]["on_failure"] = "stop"
    result = project.finetune(*SHORT, code=1)
    check_error(result, "Evaluator `my_reward` on example")
    assert "returned `'good'`, not a finite number" in result.stderr


def test_equal_rewards_exit_with_1_and_the_reason(project: Any) -> None:
    set_reward(project, "return 1.0")
    result = project.finetune(code=1)
    check_error(result, "Nothing to train on in 3 epochs: 4 groups: equal_rewards")
    assert [row["epoch"] for row in project.read("reward_history.json")] == [1, 2, 3]
    assert "Completed epoch 4" not in result.stderr


def test_an_evaluator_that_returns_nan_exits_with_1_and_the_reason(project: Any) -> None:
    set_reward(project, "return float('nan')")
    result = project.finetune(code=1)
    check_error(result, "Nothing to train on in 3 epochs: 8 runs: evaluator_failed")
    assert "No trajectories collected for epoch 1" in result.stderr


def test_finetune_does_nothing_if_not_enabled(project: Any) -> None:
    project.config["finetuning"]["enabled"] = False
    result = project.finetune()
    assert "Finetuning is not enabled" in result.stderr and not project.output.exists()


def test_json_prints_the_result_as_data(project: Any) -> None:
    result = json.loads(project.finetune("--json", *SHORT).stdout)
    assert result["epochs"] == 1 and len(result["rewards"]) == 1
    assert result["statuses"][0]["status"] == "completed"


@pytest.mark.parametrize(("target", "trained"), [("act", 4), ("nobody", 0)])
def test_only_the_target_functions_calls_are_trained_on(
    project: Any, target: str, trained: int
) -> None:
    add_code(
        project,
        "\n\nasync def parts(example, llm):\n"
        "    plan = await llm.named('plan').ask('Plan: ' + example.question, max_tokens=4)\n"
        "    return await llm.named('act').ask(plan + example.question, max_tokens=4)\n",
    )
    project.config["workflow"]["function"] = "agent:parts"
    project.config["finetuning"]["target_functions"] = [target]
    project.finetune(*SHORT, code=0 if trained else 1)  # a run without any trajectory has failed
    (row,) = project.read("training_metrics.jsonl")
    assert row["num_groups"] == trained
    assert row["failures"] == ({} if trained else {"no_calls": 8})
    if trained:
        # Each trajectory has one call of at most four tokens, not two calls.
        assert row["data/step_trainer_tokens"] <= 4 * row["data/step_num_trajectories"]
