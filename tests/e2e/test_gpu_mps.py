"""CUDA MPS: the learner's priority, and its death, which may end vLLM too but costs no step."""

from pathlib import Path

import pytest
import torch

from tests.faults.patient import BASE, hashes, sample, train
from tests.serving import Serving
from trainer.learner.precedence import Precedence
from trainer.processes.mps import PRIORITY_VARIABLE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(900),
]
FLAGS = ("--engine=vllm", "--mps", '--engine-args={"enforce_eager": true}')


def test_a_learner_killed_in_mid_step_costs_no_step(tmp_path: Path) -> None:
    faults = tmp_path / "faults"
    faults.mkdir()
    with Serving(tmp_path, BASE, *FLAGS, ART_FAULTS=str(faults)) as serving:
        train(serving, 1)
        assert sample(serving) == 1
        (faults / "learner-stepped").touch()
        train(serving, 2)
        assert not any(faults.iterdir()), "the learner was never killed"
        assert sample(serving) == 2
        train(serving, 3)
        assert sample(serving) == 3
        assert sorted(hashes(serving)) == ["0000", "0001", "0002", "0003"]


def test_the_priority_of_the_learners_stream_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import driver

    before = torch.cuda.current_stream()
    monkeypatch.setenv(PRIORITY_VARIABLE, "-1")
    try:
        precedence = Precedence.from_environment(torch.device("cuda"))
        stream = torch.cuda.current_stream()
    finally:
        torch.cuda.set_stream(before)
    assert precedence and stream != before

    def priority() -> int:
        attribute = driver.CUstreamAttrID.CU_LAUNCH_ATTRIBUTE_PRIORITY
        status, value = driver.cuStreamGetAttribute(stream.cuda_stream, attribute)
        assert status == driver.CUresult.CUDA_SUCCESS
        return int(value.priority)

    seen = []
    for _ in range(6):  # the next step always waits
        precedence.next_step()
        precedence.next_row(True)
        seen.append(priority())
    assert seen[0] == 0 and seen[-1] == -1
