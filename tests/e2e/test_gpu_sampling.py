"""vLLM on a CUDA GPU samples tokens with the logprobs that it finds when it reads them.

Our kernels decode (`trainer/engines/in_vllm`), but most of what reads a long text is vLLM's own.
The same vLLM without our kernels is the measure. Log lines show how far apart they are.
"""

import asyncio
import itertools
import logging
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import pytest
import torch

from bench.loading import write_model
from tests.contract.engines.choices import differences, sample
from tests.contract.loras import write_lora
from trainer.engines import vllm_args
from trainer.engines.choose import vllm_program
from trainer.engines.engine import Delta
from trainer.engines.vllm import VllmEngine

logger = logging.getLogger(__name__)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings("ignore"),
]
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "torch_dtype": "bfloat16",
    "vocab_size": 20_000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
}
# How much further apart ours may be than vLLM's. With an fp8 cache FlashAttention 3 rounds its
# weights in both, so a part of the error cancels out; our kernel decodes with exact ones.
FURTHER = {"auto": 1.5, "fp8": 2.0}
KERNELS = {"_attend", "_join", "_shrink", "_expand", "_sums", "_draw", "_logprobs"}
REQUESTS = 128
TOKENS = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "model"
    write_model(path, SHAPE)
    return path


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A new directory for what vLLM and Triton compile."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "compiled"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "compiled"))
    yield tmp_path / "compiled"


async def gaps(model: Path, loras: Path, log: Path, **arguments: object) -> list[float]:
    """Differences of logprobs between decoding and reading, for all sampled tokens."""
    chance = random.Random(0)
    # A cache of a given size, because vLLM's own estimate fails where others free memory meanwhile.
    memory = {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 8 * 2**30}
    settings = {**memory, "max_model_len": 4096, **arguments}
    program = vllm_program(sys.executable)
    engine = VllmEngine(model, program=program, log=log, rank=16, cuda=True, arguments=settings)
    lengths = [chance.choice([20, 300, 1000, 3000]) for _ in range(REQUESTS)]
    prompts = [[chance.randrange(20_000) for _ in range(length)] for length in lengths]
    names = [None, "lora@1", "lora@2"] * REQUESTS  # None is the base model

    async def sampled(number: int) -> Delta:
        await asyncio.sleep(number / 64)  # so that prompts join requests that decode
        request = {"prompt_ids": prompts[number], "lora": names[number]}
        (choice,) = await sample(engine, **request, max_tokens=TOKENS, ignore_eos=True)
        return choice

    async def read(number: int, choice: Delta) -> list[float]:
        request = {"prompt_ids": prompts[number] + choice.token_ids, "lora": names[number]}
        (found,) = await sample(engine, **request, max_tokens=0, prompt_logprobs=True)
        assert found.prompt_logprobs is not None
        logprobs = [it for it in found.prompt_logprobs[-TOKENS:] if it is not None]
        return differences(choice, Delta(0, logprobs=logprobs))

    await engine.start()
    try:
        for step in (1, 2):
            await engine.load(f"lora@{step}", loras / str(step))
        choices = await asyncio.gather(*map(sampled, range(REQUESTS)))
        found = await asyncio.gather(*map(read, range(REQUESTS), choices))
    finally:
        await engine.stop()
    return list(itertools.chain(*found))


@pytest.mark.parametrize("cache", ["auto", "fp8"])
async def test_our_kernels_are_as_exact_as_those_of_vllm(
    model: Path, cache: str, compiled: Path, tmp_path: Path
) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only a Hopper GPU uses our kernels")
    for step in (1, 2):
        write_lora(tmp_path / str(step), seed=step, rank=16, shape=SHAPE)
    log = tmp_path / "vllm.log"
    ours = await gaps(model, tmp_path, log, kv_cache_dtype=cache)
    told = log.read_text()
    assert "gpu_kernels.Worker" in told and "without our" not in told
    # What Triton compiled is what ran, also in CUDA graphs.
    assert {path.stem for path in compiled.rglob("_*.json")} >= KERNELS
    plain = {"kv_cache_dtype": cache, vllm_args.EXTENSION: ""}
    theirs = await gaps(model, tmp_path, log, **plain)
    figures = [f"{mean(gaps):.5f} and {max(gaps):.4f}" for gaps in (ours, theirs)]
    logger.info("%s cache, mean and largest gap: ours %s, vLLM's %s", cache, *figures)
    assert len(ours) == len(theirs) == TOKENS * REQUESTS
    assert mean(ours) <= FURTHER[cache] * mean(theirs) and max(ours) <= 2 * max(theirs)
