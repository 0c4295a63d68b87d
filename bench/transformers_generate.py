"""Measures tokens per second of `transformers.generate`, in its own environment (see engine.py)."""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM

directory, prompts_json, new_tokens, dtype = sys.argv[1:]
prompts = torch.tensor(json.loads(prompts_json))
model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
settings = {"do_sample": True, "min_new_tokens": int(new_tokens), "max_new_tokens": int(new_tokens)}
settings |= {"top_k": 0, "top_p": 1.0, "temperature": 1.0, "pad_token_id": 0}
with torch.inference_mode():
    mask = torch.ones_like(prompts)
    model.generate(
        prompts, attention_mask=mask, **{**settings, "min_new_tokens": 2, "max_new_tokens": 2}
    )
    for _ in sys.stdin:  # one run per line, so that stacks can take turns
        start = time.perf_counter()
        out = model.generate(prompts, attention_mask=mask, **settings)
        took = time.perf_counter() - start
        count = out.numel() - prompts.numel()
        print(json.dumps({"tokens": count, "seconds": took}), flush=True)
