"""`trainer eval` of the base model and two steps, against a real `trainer serve`."""

import json
import subprocess
from typing import Any

from tests.environments import client_environment


def test_base_and_two_steps_are_compared_and_a_second_call_runs_nothing(
    project: Any, server: Any
) -> None:
    project.finetune("-o", "finetuning.num_epochs", "2")
    name = project.config["trainer_adapters"]["art_adapter"]["backend"]["name"]

    def evaluate(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [project.python, "-m", "trainer", "eval", "--config_file=config.yml", *arguments]
        return subprocess.run(
            command, cwd=project.directory, env=client_environment(), capture_output=True,
            text=True, timeout=300,
        )  # fmt: skip

    models = ("-m", "tiny-random@base", "-m", f"{name}@1", "-m", f"{name}@2")
    arguments = (*models, "--num_generations", "2", "--json")
    done = evaluate(*arguments)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert [row["model"] for row in summary["models"]] == [
        "tiny-random@base",
        f"{name}@1",
        f"{name}@2",
    ]
    assert all(row["runs"] == 8 and not row["lost"] for row in summary["models"])
    assert all("characters" in row["metrics"] for row in summary["models"])
    assert summary["models"][2]["paired"]["examples"] == 4
    file = project.output / "evals/training_data.jsonl"
    runs = file.read_text().count('"kind": "run"')
    again = json.loads(evaluate(*arguments).stdout)
    assert runs == 24 == file.read_text().count('"kind": "run"')
    assert [row["mean"] for row in again["models"]] == [row["mean"] for row in summary["models"]]
    missing = evaluate("-m", f"{name}@7")
    assert missing.returncode == 1 and f"`{name}` has no step 7" in missing.stderr
    assert "hint: Its steps: " in missing.stderr and "Traceback" not in missing.stderr
