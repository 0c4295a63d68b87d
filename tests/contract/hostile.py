"""Hostile values, and a valid body of every route to put them into."""

import copy
import json
from collections.abc import Iterator
from typing import Any

MODEL = {
    **{"name": "hostile", "project": "contract", "base_model": "tiny-random", "trainable": True},
    "_internal_config": {
        "init_args": {"max_seq_length": 256},
        "engine_args": {"gpu_memory_utilization": 0.5},
        "trainer_args": {"learning_rate": 1e-5, "beta": 0.1},
        "peft_args": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]},
    },
}
PLAIN = {"name": "hostile", "project": "contract", "base_model": "tiny-random"}
USER = {"role": "user", "content": "x"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
TOKEN = {"token": "token_id:65", "logprob": -1.5, "bytes": [65], "top_logprobs": []}
CHOICE = {
    **{"finish_reason": "stop", "index": 0, "logprobs": {"content": [TOKEN]}},
    "message": {"role": "assistant", "content": "A", "tool_calls": [CALL]},
}
TRAJECTORY = {
    **{"messages_and_choices": [USER, CHOICE], "reward": 0.5, "tools": [], "metrics": {"m": 1.0}},
    "additional_histories": [{"messages_and_choices": [USER, CHOICE]}],
    **{"metadata": {"k": "v"}, "logs": ["l"], "initial_policy_version": 0},
}
EXCHANGE = {"request": {"model": "m", "messages": [USER]}, "response": {"choices": [CHOICE]}}
CAPTURED = {"exchanges": {"chat_completions": [EXCHANGE]}, "reward": 0.5}
GROUPS = [{"trajectories": [TRAJECTORY, CAPTURED], "exceptions": [], "metadata": {}}]
CONFIG = {"learning_rate": 1e-5, "kl_penalty_coef": 0.0, "adam_params": {"beta1": 0.9}}
SAMPLING = {
    **{"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 1, "n": 1},
    **{"frequency_penalty": 0.1, "presence_penalty": 0.1, "repetition_penalty": 1.1, "stop": ["x"]},
    **{"logit_bias": {"65": 1}, "stop_token_ids": [66], "min_tokens": 0, "ignore_eos": False},
    **{"stream": False, "stream_options": {"include_usage": True}, "user": "u"},
}
CHAT = {
    **{"model": "tiny-random", "max_tokens": 2, "top_logprobs": 1, "logprobs": True, **SAMPLING},
    "messages": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "r"},
        {"role": "user", "content": [{"type": "text", "text": "t"}]},
    ],
    **{"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "auto"},
    **{"response_format": {"type": "text"}, "chat_template_kwargs": {"a": 1}},
    **{"reasoning_effort": "low", "parallel_tool_calls": True},
}
COMPLETION = {"model": "tiny-random", "prompt": [65, 66], "max_tokens": 2, "logprobs": 1}
RESPONSE = {
    **{"model": "tiny-random", "max_output_tokens": 2, "instructions": "i", "temperature": 0.5},
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "t"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "o"},
    ],
    **{"tools": [{"type": "function", **FUNCTION}], "tool_choice": "auto"},
    **{"text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}, "include": []},
}
COUNT = {
    **{"model": "tiny-random", "system": [{"type": "text", "text": "s"}]},
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "t"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f"}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "r"}]},
    ],
    **{
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
    },
}
MESSAGES = {**COUNT, "max_tokens": 2, "temperature": 0.5, "stop_sequences": ["x"], "top_k": 3}
BODIES: dict[str, Any] = {
    "/register": MODEL,
    "/_get_step": PLAIN,
    "/_prepare_backend_for_training": {"model": PLAIN, "config": {"server_args": {"api_key": "k"}}},
    "/_train_model": {
        **{"model": PLAIN, "trajectory_groups": GROUPS, "config": CONFIG, "verbose": False},
        "dev_config": {"epsilon": 0.2, "packed_sequence_length": 64, "kl_penalty_step_lag": 1},
    },
    "/_train_sft": {
        **{"model": PLAIN, "trajectories": [TRAJECTORY], "verbose": False},
        "config": {"learning_rate": 1e-5, "batch_size": 2},
    },
    "/_log": {"model": PLAIN, "trajectory_groups": GROUPS, "split": "val"},
    "/_delete_checkpoint_files": {"model": PLAIN, "steps_to_keep": [0]},
    "/_delete_checkpoints": PLAIN,
    "/_lease_checkpoint": {"model": PLAIN, "step": 0, "id": "i"},
    "/_release_checkpoint": {"model": PLAIN, "step": 0, "id": "i"},
    "/_experimental_fork_checkpoint": {"model": PLAIN, "from_model": "no", "not_after_step": 1},
    "/v1/preview/models": {**PLAIN, "entity": "e", "return_existing": True},
    "/v1/preview/training-jobs": {
        **{"model_id": "contract~hostile", "trajectory_groups": GROUPS},
        "experimental_config": CONFIG,
    },
    "/v1/preview/models/contract~hostile/log": {"trajectory_groups": GROUPS, "split": "val"},
    "/v1/chat/completions": CHAT,
    "/rollouts/hostile/v1/chat/completions": {"model": "tiny-random", "messages": [USER], "n": 1},
    "/v1/completions": COMPLETION,
    "/v1/responses": RESPONSE,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": COUNT,
}
DEEP = "[" * 60 + "]" * 60
VALUES = [
    *("null", "true", "0", "-1", "1.5", '""', '"x"', "[]", "{}", "[null]", '{"x": [1]}', "[[1]]"),
    *("NaN", "-Infinity", "1e400", "1e308", "1" + "0" * 400, "9" * 300, str(2**63), str(-(2**64))),
    *(r'"\ud800"', r'"\u0000"', '"²"', '"٣"', '"../../x"', '"run@' + "9" * 5000 + '"', DEEP),
    *('"token_id:99999999999"', '"token_id:²"', '{"self": 1}', '"' + "[" * 3000 + '"', '"a/b@-1"'),
    *(
        '"' + "x" * 300 + '"',
        '"ledger.db"',
        '{"type": 1}',
        '["q_proj", "q_proj"]',
        '"\\ud83d\\ude00"',
    ),
]


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places in a body: every leaf, and every list and object."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else ()
    for key, item in enumerate(value) if isinstance(value, list) else items:
        yield from leaves(item, (*path, key))


def replaced(body: Any, path: tuple[Any, ...], value: str) -> bytes:
    """The JSON of a body with `value`, a piece of JSON, at `path`."""
    body = copy.deepcopy(body)
    holder = body
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = "@hostile@"
    return json.dumps(body).replace('"@hostile@"', value).encode()
