"""The thin path on this machine: fresh clone, empty home, `--local`."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.timeout(900)
def test_a_local_cluster_trains_and_its_checkpoints_come_home(
    local_laptop: Any,
    train_two_steps: Callable[[Any], None],
    pull_home: Callable[[Any, str], None],
    run_beside: Callable[[Any], None],
) -> None:
    laptop = local_laptop
    laptop.run("./launch-cluster.sh --local")
    train_two_steps(laptop)
    run_beside(laptop)
    state = "~/.art-cluster/clusters/art/home/sky_workdir/.art"
    pull_home(
        laptop,
        laptop.run(f"cd {state} && find . -path '*/checkpoints/*' -type f -exec sha256sum {{}} +"),
    )
    laptop.run("./launch-cluster.sh --local")  # safe to repeat: the server goes on
    laptop.run(".venv/bin/launcher down --local --yes")
    laptop.run(".venv/bin/launcher down --local --yes")
    assert laptop.run(".venv/bin/launcher ls --local --json") == "[]\n"
