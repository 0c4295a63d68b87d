"""What `launcher init` writes runs at once, whichever agent it starts from."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.init import AGENTS, write_project
from tests.environments import ROOT, client_environment, python_of
from tests.serving import Serving

# Environments that the matrix of frameworks makes; they have no package of ours.
ENVIRONMENTS = {
    "langgraph": "matrix-openai-3",
    "openai-agents": "matrix-openai-3",
    "pydantic-ai": "matrix-openai-3",
    "verifiers": "matrix-verifiers",
}


@pytest.mark.timeout(1800)  # a first run creates an environment
@pytest.mark.parametrize("agent", AGENTS)
def test_the_agent_of_a_new_project_runs(agent: str, server: Serving, tmp_path: Path) -> None:
    environment = ENVIRONMENTS.get(agent)
    python = python_of(environment, ours=False) if environment else sys.executable
    write_project(tmp_path, agent, f"new-{agent}")
    settings = {
        "llms.policy.base_url": f"{server.openai}/v1",
        "trainer_adapters.backend.backend.port": server.control.rpartition(":")[2],
        "trainer_adapters.backend.backend.base_model": "tiny-random",
        "trajectory_builders.builder.num_generations": "2",
    }
    overrides = [part for name, value in settings.items() for part in ("-o", name, value)]
    done = subprocess.run(
        [python, "-m", "trainer", "dry-run", "finetune.yaml", "--json", *overrides],
        cwd=tmp_path, env={**client_environment(), "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
    printed = json.loads(done.stdout)
    checks = {check["name"]: check for check in printed["checks"]}
    # A random model fills a forced call with noise, which the agent must survive.
    assert checks["runs"]["ok"], checks
    assert printed["estimate"]["epoch"]["sampled_tokens"] > 0
