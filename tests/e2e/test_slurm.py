"""The thin path on a real Slurm cluster, through SkyPilot, ssh and rsync."""

import subprocess
from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.timeout(1800)
def test_a_slurm_cluster_trains_and_its_checkpoints_come_home(
    slurm_laptop: Any,
    train_two_steps: Callable[[Any], None],
    pull_home: Callable[[Any, str], None],
    run_beside: Callable[[Any], None],
) -> None:
    laptop = slurm_laptop
    laptop.run("./launch-cluster.sh sky/art-cpu.yaml")
    train_two_steps(laptop)
    assert laptop.run("ssh -q art command -v trainer").endswith("sky_workdir/.venv/bin/trainer\n")
    listed = laptop.run("ssh -q art ls sky_workdir/.art/e2e/models/tiny/checkpoints")
    assert listed.split() == ["0000", "0001", "0002"]
    find = "find . -path './*/checkpoints/*' -type f -exec sha256sum {} +"
    pull_home(laptop, laptop.run(f'ssh -q art "cd sky_workdir/.art && {find}"'))
    run_beside(laptop)
    # Task and arguments of `sky launch` in any order; the GPUs of the lab are declared, not real.
    laptop.run("./launch-cluster.sh --dryrun --infra slurm/lab -c gpu sky/art.yaml")
    # The secret is where the user wrote it, and in nothing else of the laptop.
    found = laptop.run(f"cd ~ && grep -rlF --exclude-dir=.venv {laptop.secret} .")
    assert found.split() == ["./art-cluster/.env"]
    laptop.run(".venv/bin/sky down --yes art")
    assert laptop.run(".venv/bin/launcher ls --json") == "[]\n"
    squeue = ["bash", "-c", "SLURM_CONF=/tmp/art-slurm-lab/slurm/slurm.conf squeue --noheader"]
    assert subprocess.run(squeue, capture_output=True, text=True).stdout == ""
