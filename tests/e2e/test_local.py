"""The thin path on this machine: fresh clone, empty home, `--local`."""

import json
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.timeout(900)
def test_a_local_cluster_trains_and_its_checkpoints_come_home(
    local_laptop: Any,
    train_two_steps: Callable[[Any, str], None],
    pull_home: Callable[[Any, str], None],
    run_beside: Callable[[Any], None],
) -> None:
    laptop = local_laptop
    laptop.run("./launch-cluster.sh --local sky/art-cpu.yaml")
    with laptop.tunnel() as exports:
        train_two_steps(laptop, exports)
    run_beside(laptop)
    state = "~/.art-cluster/clusters/art/home/sky_workdir/.art"
    pull_home(
        laptop,
        laptop.run(f"cd {state} && find . -path '*/checkpoints/*' -type f -exec sha256sum {{}} +"),
    )
    laptop.run("./launch-cluster.sh --local sky/art-cpu.yaml")  # safe to repeat: the server goes on
    laptop.run(".venv/bin/launcher down --local --yes")
    laptop.run(".venv/bin/launcher down --local --yes")
    assert laptop.run(".venv/bin/launcher ls --local --json") == "[]\n"


@pytest.mark.timeout(900)
def test_the_python_api_of_the_readme_runs_as_it_stands_there(local_laptop: Any) -> None:
    laptop = local_laptop
    laptop.run("scripts/install")
    readme = (laptop.clone / "README.md").read_text()
    (script,) = re.findall(r"```python\n(from pathlib import Path\n.*?)```", readme, re.DOTALL)
    assert len([line for line in script.splitlines() if line]) == 9
    (laptop.clone / "readme.py").write_text(script)
    cost, endpoints, pulled = laptop.run(".venv/bin/python readme.py").splitlines()
    assert cost.startswith("0 Cost(so_far=0.0")
    ports = laptop.clone.joinpath(".env").read_text()
    assert all(f"={url.split(':')[2].split('/')[0]}\n" in ports for url in endpoints.split())
    assert pulled.startswith("[")
    assert laptop.run(".venv/bin/launcher ls --local --json") == "[]\n"


@pytest.mark.timeout(3600)
def test_one_command_trains_smollm2_on_temporal_clue(
    local_laptop: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    # A third of the default's epochs is enough to see it learn.
    told = local_laptop.run("./launch-cluster.sh --local --epochs 8 2>&1")
    with capsys.disabled():
        sys.stdout.write("\n" + told[told.index("Trained 8 steps") :])
    reward = re.search(r"puzzles.*: (\S+) before, (\S+) after", told)
    right = re.search(r"valid answers: .* before, (\S+) after \(0.33 by guessing\)", told)
    # By chance, two means of 48 puzzles differ by 0.03. Six epochs have gained as little as 0.09.
    assert reward and float(reward[2]) - float(reward[1]) >= 0.1
    assert right and float(right[1]) - 1 / 3 >= 0.1
    metrics = local_laptop.clone / ".art/temporal-clue/training_metrics.jsonl"
    rewards = [json.loads(line)["avg_reward"] for line in metrics.read_text().splitlines()]
    assert sum(rewards[-2:]) - sum(rewards[:2]) >= 0.1  # of 96 runs each; by chance 0.04
    checkpoint = re.search(r"Checkpoint: (\S+)", told)
    assert checkpoint and local_laptop.run(f"ls {checkpoint[1]}").split()[:2] == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    plot = local_laptop.clone / ".art/temporal-clue/reward_plot.png"
    assert plot.read_bytes().startswith(b"\x89PNG")
    local_laptop.run(".venv/bin/launcher down --local --discard --yes")
