"""`trainer dry-run` against a real `trainer serve`: it checks, estimates and trains nothing."""

import json
import subprocess
from typing import Any

import httpx

from tests.environments import client_environment


def test_a_dry_run_checks_one_group_estimates_the_run_and_trains_nothing(
    project: Any, server: Any
) -> None:
    project.write()

    def dry_run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [project.python, "-m", "trainer", "dry-run", "config.yml", *arguments]
        return subprocess.run(
            command, cwd=project.directory, env=client_environment(), capture_output=True,
            text=True, timeout=300,
        )  # fmt: skip

    rate = ("-o", "trainer_adapters.art_adapter.training.learning_rate", "1e-4")
    done = dry_run(*rate, "--json", "--gpu", "L4", "--price", "0.7")
    assert "Traceback" not in done.stderr
    printed = json.loads(done.stdout)
    checks = {check["name"]: check for check in printed["checks"]}
    assert checks["runs"]["message"] == "2 runs of one example ended"
    assert checks["reward"]["ok"] and checks["tools"]["ok"]
    # Six tokens may all be cut off, and two samples of a random model may score the same.
    assert done.returncode == (0 if all(one["ok"] for one in printed["checks"]) else 1)
    epoch = printed["estimate"]["epoch"]
    assert printed["estimate"]["runs_per_epoch"] == 8 and 0 < epoch["sampled_tokens"] <= 48
    assert epoch["prompt_tokens"] > 8 and epoch["dollars"] > 0
    name = project.config["trainer_adapters"]["art_adapter"]["backend"]["name"]
    served = httpx.get(f"{server.openai}/v1/models").json()["data"]
    assert f"{name}@1" not in [model["id"] for model in served]
    ahead = ("finetuning.max_steps_off_policy", "1"), ("finetuning.groups_per_step", "3")
    overrides = [part for name, value in ahead for part in ("-o", name, value)]
    printed = json.loads(dry_run(*rate, *overrides, "--json").stdout)
    assert printed["estimate"]["runs_per_epoch"] == 6
    refused = dry_run("--price", "1")
    assert refused.returncode == 1 and "`--price` is not used without `--gpu`" in refused.stderr
    (project.directory / "agent.py").write_text("def answer(example, llm):\n    raise KeyError\n")
    broken = dry_run("-o", "eval.evaluators.my_reward.function", "json:dumps")
    assert broken.returncode == 1 and "BAD  runs: 2 of 2 runs were lost" in broken.stdout
