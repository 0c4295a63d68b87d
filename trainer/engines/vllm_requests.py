"""Requests to vLLM's `/v1/completions` and what their answers mean. Pure functions."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kit.types import Json
from trainer.engines.constraints import choices, json_schema
from trainer.engines.engine import Constraint, SampleRequest, TopLogprobs

ID = "token_id:"  # before the number of a token, with `return_tokens_as_token_ids`


def sampling_body(
    request: SampleRequest, *, model: str, n: int, limit: int, ends: Collection[int]
) -> Json:
    """Return the body that samples `n` choices of at most `limit` tokens."""
    body: Json = {
        "model": model,
        "prompt": request.prompt_ids,
        "n": n,
        "max_tokens": limit,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "min_p": request.min_p,
        "frequency_penalty": request.frequency_penalty,
        "presence_penalty": request.presence_penalty,
        "repetition_penalty": request.repetition_penalty,
        "logit_bias": {str(token): bias for token, bias in request.logit_bias} or None,
        "min_tokens": request.min_tokens,
        "seed": request.seed,
        "stop": list(request.stop),
        "stop_token_ids": sorted(ends),
        "ignore_eos": request.ignore_eos,
        "logprobs": request.top_logprobs,  # 0: only of the sampled token
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "stream": request.stream,
    }
    if request.constraint:
        body["structured_outputs"] = structured_outputs(request.constraint)
    return body


def structured_outputs(constraint: Constraint) -> Json:
    match constraint.kind:
        case "json_schema" | "json_object":
            return {"json": json.dumps(json_schema(constraint))}
        case "choice":
            return {"choice": choices(constraint)}
        case kind:
            return {kind: constraint.value}


def scoring_body(tokens: Sequence[int], *, model: str, top: int) -> Json:
    """Return the body that asks for the policy's own logprobs of `tokens`."""
    return {
        "model": model,
        "prompt": list(tokens),
        "max_tokens": 1,  # vLLM samples at least one
        "temperature": 0,
        "prompt_logprobs": top,
        "stream": False,
    }


def scores(answer: Json, tokens: Sequence[int], top: int) -> tuple[list[float | None], TopLogprobs]:
    """Return the logprob of each token, None for the first, and the likeliest at its place."""
    rows: list[Mapping[str, Any] | None] = answer["choices"][0]["prompt_logprobs"]
    logprobs = [
        None if row is None else float(row[str(token)]["logprob"])
        for token, row in zip(tokens, rows, strict=True)
    ]
    if not top:
        return logprobs, []
    likely = [{int(t): float(v["logprob"]) for t, v in (row or {}).items()} for row in rows]
    return logprobs, [likeliest(row, top) for row in likely]


def likeliest(logprobs: Mapping[int, float], top: int) -> list[tuple[int, float]]:
    """Return the `top` likeliest tokens; vLLM adds the sampled one to them."""
    return sorted(logprobs.items(), key=lambda pair: -pair[1])[:top]


def top_logprobs(row: Json, top: int) -> TopLogprobs:
    """Return the likeliest tokens at each place of a choice."""
    if not top:
        return []
    rows = row["logprobs"]["top_logprobs"] or []
    return [
        likeliest({int(token.removeprefix(ID)): value for token, value in each.items()}, top)
        for each in rows
    ]
