"""Our kernels inside the classes of vLLM's GPU workers, without a GPU: an upgrade must fit them."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.environments import triton_of_vllm
from tests.serving import vllm_python
from trainer.engines.vllm_args import EXTENSION, IN_VLLM, KERNELS
from trainer.processes.mps import BY_STREAMS

Facts = dict[str, Any]
ROUNDING = 1e-3  # of fp16, relative to the result; also with an fp8 cache, as both read the same


@pytest.fixture(scope="module")
def facts() -> Facts:
    python = vllm_python()
    path = os.pathsep.join(map(str, (triton_of_vllm(python), IN_VLLM)))
    variables = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, Path(__file__).with_name("kernels_in_vllm.py"), json.dumps({EXTENSION: KERNELS})],
        env={**os.environ, **BY_STREAMS, **variables, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def test_a_gpu_worker_of_vllm_loads_our_kernels(facts: Facts) -> None:
    assert facts["worker is extended"]
    assert facts["warnings"] == []
    assert facts["not replaced"] == []


# Requests that FlashAttention computes beside us, as the tokens of each.
REST = {
    "decodes": [],
    "mixed": [7, 9],
    "prompt first": [9, 1],
    "padded requests": [],
    "padded tokens": [],
    "padded mixed": [7],
    "graphs of mixed batches": [1, 1],
}
WHOLE = ("prompt first", "graphs of mixed batches")


@pytest.mark.parametrize("batch", REST)
@pytest.mark.parametrize("cache", ["float16", "fp8"])
def test_attention_is_that_of_vllm_alone(facts: Facts, cache: str, batch: str) -> None:
    assert facts[f"attention {cache} {batch}"] < ROUNDING
    # vLLM's plan for FlashAttention divides the whole batch, so a part of it has none.
    plan = {"planned": True, "splits": 32} if batch in WHOLE else {"planned": False, "splits": 0}
    expected = [{"tokens": REST[batch], **plan}] if REST[batch] else []
    assert facts[f"FlashAttention {cache} {batch}"] == expected


# Launches of our kernels: a batch without LoRAs needs none, and long prompts stay with vLLM.
LAUNCHES = {
    "eager": 1,
    "eager, none": 0,
    "eager, long": 0,
    "compiled": 1,
    "compiled, fewer": 1,
    "compiled, none": 0,
    "compiled, long": 0,
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_layers_of_vllm_add_loras_with_our_kernels(facts: Facts, name: str) -> None:
    assert facts[f"LoRA {name}"] < ROUNDING
    assert facts[f"our LoRA kernels {name}"] == LAUNCHES[name]


def test_vllm_samples_and_computes_logprobs_with_our_kernels(facts: Facts) -> None:
    assert facts["likeliest words"]
    assert facts["only word"]
    assert facts["seeds repeat"]
    assert len(set(facts["words by seed and position"])) == 4
    assert facts["words of logprobs"]
    assert facts["logprobs"] < 1e-5
    assert facts["our sampling kernels"] == [3, 3]  # in three steps
