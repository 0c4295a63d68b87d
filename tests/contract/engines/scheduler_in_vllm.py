"""Runs the same requests through vLLM's own scheduler and ours, and prints both as JSON.

`test_light_scheduler.py` runs it in the environment of vLLM for CPUs. The requests share prompts,
end at different lengths, and need more pages than there are, so that some are preempted.
"""

import json
import random
import sys
from collections import defaultdict
from typing import Any

import numpy
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

from bench.engine_steps import add, outputs_of, scheduler

REQUESTS, AT_ONCE, PAGES = 60, 24, 45


def facts(ours: bool, likeliest: int) -> dict[str, Any]:
    """What each step schedules, and what is handed over of each request."""
    draw = random.Random(1)
    engine = scheduler(AT_ONCE, ours, pages=PAGES)
    answers: dict[str, list[Any]] = defaultdict(list)
    steps, longest = [], 0
    for number in range(REQUESTS):
        sizes = {"prompt": draw.choice([20, 33, 64]), "answer": draw.randint(1, 70)}
        wanted = likeliest if number % 7 == 0 else 0
        add(engine, number, seed=number % 5, logprobs=wanted, **sizes)
    before = engine.schedule()
    while engine.has_unfinished_requests() or before.num_scheduled_tokens:
        after = engine.schedule()
        cached = after.scheduled_cached_reqs
        steps.append(
            {
                "tokens": after.num_scheduled_tokens,
                "new": {new.req_id: new.block_ids for new in after.scheduled_new_reqs},
                "pages": dict(zip(cached.req_ids, cached.new_block_ids, strict=True)),
                "preempted": sorted(after.preempted_req_ids or ()),
            }
        )
        sampled = outputs_of(before, width=1 + likeliest, draw=draw)
        for client in engine.update_from_output(before, sampled).values():
            for output in client.outputs:
                longest = max(longest, len(output.new_token_ids))
                rows = (numpy.asarray(part).tolist() for part in output.new_logprobs[:3])
                answers[output.request_id] += zip(output.new_token_ids, *rows, strict=True)
        before = after
    for number, answer in answers.items():  # of the likeliest tokens vLLM tells all requests
        width = 1 + (likeliest if int(number) % 7 == 0 else 0)
        answers[number] = [(token, ids[:width], values[:width], rank)
                           for token, ids, values, rank in answer]  # fmt: skip
    return {"steps": steps, "answers": answers, "longest": longest}


if __name__ == "__main__":
    init_none_hash(sha256)
    found = [facts(ours, likeliest) for likeliest in (0, 2) for ours in (False, True)]
    sys.stdout.write(json.dumps(found))
