"""Processes that hold a policy together load only their shards, and compute what one computes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.loading import SHAPE, memory_to_load, write_model
from tests.serving import free_port

ROOT = Path(__file__).parents[2]
SMALL = {
    **SHAPE,
    "vocab_size": 261,  # odd, so that the shards of the embeddings differ in size
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
# Biases and separate embeddings; norms of q and k, and one matrix for embeddings and head.
FAMILIES = {
    "qwen2": {**SMALL, "model_type": "qwen2", "tie_word_embeddings": False},
    "qwen3": {**SMALL, "model_type": "qwen3"},
}


def run_ranks(work: str, model: Path, count: int) -> list[dict[str, Any]]:
    """Run `shard_ranks.py` in `count` processes; return what each one printed."""
    world = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = [
        subprocess.Popen(
            [sys.executable, Path(__file__).with_name("shard_ranks.py"), work, model],
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                **world,
                "RANK": str(rank),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
            },
        )
        for rank in range(count)
    ]
    try:
        outputs = [one.communicate()[0] for one in started]
    finally:
        for one in started:
            one.kill()
    assert [one.returncode for one in started] == [0] * count
    return [json.loads(output.splitlines()[-1]) for output in outputs]


@pytest.mark.parametrize(("family", "count"), [("qwen2", 2), ("qwen3", 3)])
def test_each_process_holds_its_share_of_the_model_and_together_they_have_all(
    tmp_path: Path, family: str, count: int
) -> None:
    write_model(tmp_path / "model", FAMILIES[family])
    ranks = run_ranks("values", tmp_path / "model", count)
    for form in ("plain", "compiled"):
        for found in (rank[form] for rank in ranks):
            assert found["differ"] == []
            assert found["compared"] > 20
            # All but the norms, which every process has, and up to a row more of each weight.
            assert found["held"] == pytest.approx(found["total"] / count, rel=0.1)
        # Nothing is held twice but the norms.
        norms = sum(rank[form]["held"] for rank in ranks) - ranks[0][form]["total"]
        assert 0 < norms < 0.02 * count * ranks[0][form]["total"]


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_layers_of_two_processes_give_the_gradients_of_one(
    tmp_path: Path, family: str
) -> None:
    write_model(tmp_path / "model", FAMILIES[family])
    for found in run_ranks("gradients", tmp_path / "model", 2):
        assert found["effect of the LoRA"] > 0.01  # or the guards below would prove nothing
        assert len(found["errors"]) == 3
        for name, error in found["errors"].items():
            assert error < 1e-4, name
        # With gradients, without, and without the LoRA: all layers share each.
        assert found["graphs"] == 3
        # Four in each of two layers. FSDP releases the memory of those that autograd has saved.
        assert (found["gathered again"], found["kept"]) == (8, 0)


async def test_no_process_ever_holds_the_whole_model(tmp_path: Path) -> None:
    parameters = write_model(tmp_path / "model", {**SHAPE, "num_hidden_layers": 16})
    whole = 4 * parameters  # in fp32
    assert whole > 900 * 2**20
    for found in await memory_to_load(tmp_path / "model", 2, tmp_path / "log"):
        # FSDP and AdamW import modules meanwhile, and the allocator rounds up: about 150 MB.
        assert whole / 2 < found.peak < 0.75 * whole
