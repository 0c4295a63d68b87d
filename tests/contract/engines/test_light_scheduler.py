"""Our scheduler in vLLM schedules what vLLM's own would, and hands over the same tokens."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.serving import vllm_python
from trainer.engines.in_vllm.light_scheduler import MOST
from trainer.engines.vllm_args import IN_VLLM

ROOT = Path(__file__).parents[3]
Facts = dict[str, Any]


@pytest.fixture(scope="module")
def facts() -> list[Facts]:
    """vLLM's own and ours, without and with requests for the likeliest tokens."""
    done = subprocess.run(
        [vllm_python(), Path(__file__).with_name("scheduler_in_vllm.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, IN_VLLM)))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    found: list[Facts] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("first", [0, 2])
def test_steps_and_pages_are_those_of_vllm(facts: list[Facts], first: int) -> None:
    theirs, ours = facts[first : first + 2]
    assert ours["steps"] == theirs["steps"]
    assert any(step["preempted"] for step in ours["steps"])
    assert any(pages for step in ours["steps"] for pages in step["pages"].values())


@pytest.mark.parametrize("first", [0, 2])
def test_tokens_and_logprobs_are_those_of_vllm(facts: list[Facts], first: int) -> None:
    theirs, ours = facts[first : first + 2]
    assert len(ours["answers"]) == 60
    assert ours["answers"] == theirs["answers"]
    assert theirs["longest"] == 1 and ours["longest"] == MOST
