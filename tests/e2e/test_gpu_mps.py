"""Under CUDA MPS the death of the learner may end vLLM too: that costs time, but no step."""

from pathlib import Path

import pytest
import torch

from tests.faults.patient import BASE, hashes, sample, train
from tests.serving import Serving

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
