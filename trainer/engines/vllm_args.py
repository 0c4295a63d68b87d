"""The flags of `vllm serve`: our defaults, the user's `engine_args`, and rejected settings."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from kit.types import Json
from trainer.base_model.json_files import read_object
from trainer.base_model.precision import dtype_name
from trainer.config import Target
from trainer.engines.gpus import parts_of
from trainer.errors import CheckpointError, Unsupported

BASE = "base"  # vLLM's name for the model without a LoRA
EXTENSION = "worker_extension_cls"  # the setting that loads files of `in_vllm` into workers
KERNELS = "gpu_kernels.Worker"
WITHOUT_KERNELS = "stream_priority.Worker"  # for a vLLM that died in our kernels
IN_VLLM = Path(__file__).parent / "in_vllm"
START = ("-m", "start_vllm", "serve")  # of `in_vllm`, which is on vLLM's path
# The ranks that vLLM has kernels for, smallest first.
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
# Numbers of tokens that vLLM captures CUDA graphs for, at 0.4 s each. Its own list has 51 and ends
# at 512. A large step samples 1,024 requests at once, some of which bring a prompt; without a graph
# vLLM needs more time to launch such a batch than the GPU to compute it.
GRAPHS = (
    *(1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32)),
    *(*range(256, 512, 64), *range(512, 1536, 128), 1536, 1792, 2048),
)
# Settings of vLLM that decide which graphs it captures.
_GRAPH_SETTINGS = (
    *("compilation_config", "cudagraph_capture_sizes", "max_cudagraph_capture_size"),
    *("enforce_eager", "max_num_seqs", "optimization_level", "performance_mode"),
    *("speculative_config",),
)

# Settings that would break what the server relies on, and why.
_WHERE = "the server chooses where vLLM listens, and nothing else may reach it"
_LORA = "the server itself loads one LoRA per step"
_TOKENS = "the server needs exact tokens and the policy's own logprobs"
_CHAT = "the server handles chat templates and tool calls"
_STRUCTURED = "a constraint has to mean the same on every engine"
_ONE = "several API processes would each know different LoRAs"
_NODES = "the server itself divides vLLM over machines, with `--engine-nodes`"
REFUSED = {
    **dict.fromkeys(("host", "port", "uds", "api_key", "root_path", "grpc", "grpc_port"), _WHERE),
    **dict.fromkeys(("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs"), _WHERE),
    **dict.fromkeys(("config", "model", "model_tag", "served_model_name", "headless"), _WHERE),
    **dict.fromkeys(("enable_lora", "lora_modules", "lora_dtype", "fully_sharded_loras"), _LORA),
    **dict.fromkeys(("lora_target_modules",), _LORA),
    **dict.fromkeys(("logprobs_mode", "generation_config", "skip_tokenizer_init"), _TOKENS),
    **dict.fromkeys(("override_generation_config", "tokenizer", "runner", "task"), _TOKENS),
    **dict.fromkeys(("chat_template", "enable_auto_tool_choice", "tool_call_parser"), _CHAT),
    **dict.fromkeys(("reasoning_parser", "response_role", "tool_parser_plugin"), _CHAT),
    **dict.fromkeys(("structured_outputs_config",), _STRUCTURED),
    **dict.fromkeys(("api_server_count", "data_parallel_external_lb"), _ONE),
    **dict.fromkeys(("nnodes", "node_rank", "master_addr", "master_port"), _NODES),
}

# vLLM's own defaults: a client that sets one of these does not make vLLM restart.
VLLM_DEFAULTS = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "enforce_eager": False,
}


def check(arguments: Mapping[str, Any], devices: str | None = None, nodes: int = 1) -> None:
    """Raise an error that names the first argument a user must not set.

    `devices` are the GPUs on each of the `nodes` machines that hold the model together.
    """
    for name in arguments:
        if why := REFUSED.get(name):
            raise Unsupported(f"`engine_args.{name}` cannot be set: {why}")
        if not name.isidentifier():
            raise Unsupported(f"`engine_args.{name}` is not the name of a vLLM setting")
    if nodes > 1 and "distributed_executor_backend" in arguments:
        raise Unsupported(f"`engine_args.distributed_executor_backend` cannot be set: {_NODES}")
    parts = parts_of(arguments, nodes)
    if nodes > 1 and (parts % nodes or arguments.get("data_parallel_size", 1) != 1):
        raise Unsupported(
            f"`engine_args` divides vLLM into {parts} parts, but {nodes} machines hold one copy",
            hint=f"Set `tensor_parallel_size` only, or `pipeline_parallel_size` to {nodes}",
        )
    if devices and parts > nodes * len(devices.split(",")):
        where = f"`{devices}`" if nodes == 1 else f"`{devices}` on each of {nodes} machines"
        raise Unsupported(
            f"`engine_args` divides vLLM over {parts} GPUs, but the engine has {where}",
            hint="Use fewer, or start the server with more `--engine-devices`",
        )


def rank_for(rank: int) -> int:
    """Return the smallest `--max-lora-rank` for a LoRA of `rank`: a higher one costs more."""
    for allowed in RANKS:
        if rank <= allowed:
            return allowed
    raise Unsupported(f"vLLM supports LoRAs up to rank {RANKS[-1]}, not `{rank}`")


def rank_of(lora: Path) -> int:
    """Return the rank of the LoRA in a directory."""
    path = lora / "adapter_config.json"
    rank = read_object(path, CheckpointError, "Pull it again").get("r")
    if not isinstance(rank, int):
        raise CheckpointError(f"`{path}` has no rank `r`")
    return rank


def defaults(directory: Path, *, rank: int, cuda: bool, shared: bool = True) -> Json:
    """Return our defaults; `shared` is whether the learner uses the same GPUs."""
    settings: Json = {
        "dtype": dtype_name(directory, cuda=cuda),  # the same as the learner's
        "enable_prefix_caching": True,
        "scheduler_cls": "light_scheduler.scheduler",  # of `in_vllm`
        "max_lora_rank": rank_for(rank),
        # A run samples from its newest step; the others are for runs that stay at an older one. On
        # a CPU each place for a LoRA costs time, used or not.
        "max_loras": 4 if cuda else 2,
        "max_cpu_loras": 8 if cuda else 4,
    }
    if cuda:
        share = 0.5 if shared else 0.9
        return {**settings, EXTENSION: KERNELS, "gpu_memory_utilization": share}
    # Compiling takes minutes on a CPU and gains little. Chunked prefill of a seeded request
    # crashes vLLM's engine on a CPU: "CPU Generator does not use offset".
    slow = {"enforce_eager": True, "enable_chunked_prefill": False}
    return {**settings, EXTENSION: "cpu_loras.Worker", **slow}


def spread(arguments: Mapping[str, Any], devices: str | None, nodes: int = 1) -> Json:
    """Return the sizes that, with `arguments`, make vLLM use all GPUs of all machines."""
    gpus = nodes * len(devices.split(",")) if devices else 1
    tensor = gpus // (parts_of(arguments, nodes) or 1)
    sizes = {"pipeline_parallel_size": nodes, "tensor_parallel_size": tensor}
    return {name: size for name, size in sizes.items() if size > 1}


def graphs(arguments: Mapping[str, Any]) -> Json:
    """Return which CUDA graphs vLLM captures, unless `arguments` decide it."""
    decided = any(arguments.get(name) for name in _GRAPH_SETTINGS)
    return {} if decided else {"cudagraph_capture_sizes": list(GRAPHS)}


def quantization(kind: str | None) -> Json:
    """Return vLLM's setting for the learner's fp8: one scale per token, and one per output."""
    return {"quantization": "fp8_per_channel"} if kind == "fp8" else {}


def command_line(directory: Path, socket: Path | None, arguments: Mapping[str, Any]) -> list[str]:
    """Return the arguments of `vllm serve`: without a socket, for a part of another's vLLM."""
    # Before a middleware of the user's: the flag adds to those named so far.
    route = ["--middleware", "flat_completions.Middleware"] if socket else []
    ours: Json = {
        **({"uds": str(socket), "served_model_name": BASE} if socket else {"headless": True}),
        "enable_lora": True,
        # Without this, vLLM also prepares a LoRA of the head. It costs time, and on a CPU several
        # requests for the logprobs of prompts crash in it.
        "lora_target_modules": list(get_args(Target)),
        "logprobs_mode": "raw_logprobs",  # before temperature, top-p and top-k
        # The library that the embedded engine uses.
        "structured_outputs_config": {"backend": "guidance"},
        # The model's own generation_config may set penalties and top-k that no client requested.
        "generation_config": "vllm",
        "disable_uvicorn_access_log": True,
    }
    more = arguments.get("additional_config", {})
    if arguments.get(EXTENSION) == KERNELS and isinstance(more, dict):
        # vLLM keeps compiled code by its settings, but not by the extension. Without kernels it
        # must not load code that calls them.
        ours["additional_config"] = {**more, "art_cluster_kernels": 1}
    if socket and arguments.get("data_parallel_size", 1) > 1:
        ours["api_server_count"] = 1  # its own default would be one for each copy of the model
    return [str(directory), *route, *flags({**arguments, **ours})]


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return vLLM's flags for settings by their Python names; None leaves a flag out."""
    result: list[str] = []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            result.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, dict):
            result += [flag, json.dumps(value)]
        elif isinstance(value, list | tuple):
            result += [flag, *(str(item) for item in value)]
        else:
            result += [flag, str(value)]
    return result


def sleep_environment(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return the variable that enables vLLM's routes to sleep and to wake up, if needed."""
    return {"VLLM_SERVER_DEV_MODE": "1"} if arguments.get("enable_sleep_mode") else {}


def environment(*, cuda: bool) -> dict[str, str]:
    """Return the variables to add to the vLLM process's environment."""
    variables = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # Its own default, 5 s, is also httpx's: a request that is sent while vLLM closes the
        # connection would be lost.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(IN_VLLM), os.environ.get("PYTHONPATH")])),
    }
    if cuda:
        # For the LoRA's kernels, by GPU: `bench/lora_kernels.py` compares them with vLLM's own.
        variables["VLLM_TUNED_CONFIG_FOLDER"] = os.environ.get(
            "VLLM_TUNED_CONFIG_FOLDER", str(IN_VLLM / "tuned")
        )
        # All requests wait while vLLM converts a new LoRA, in some 500 small operations. Several
        # threads would wait for each other in each of them; vLLM for several GPUs takes one too.
        variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    else:
        # vLLM's own `spawn` is for CUDA; each of its processes would import everything again.
        method = "VLLM_WORKER_MULTIPROC_METHOD"
        variables[method] = os.environ.get(method, "fork")
        # On a CPU the first logprob would compile C++ for half a minute, even in eager mode.
        variables["TORCH_COMPILE_DISABLE"] = "1"
        # In GiB. vLLM's own default is a share of the machine's memory.
        variables["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "2")
        # Its own default binds the threads to the first cores, where they starve if other
        # processes are busy there: the learner, or a second vLLM that is bound to the same ones.
        variables["VLLM_CPU_OMP_THREADS_BIND"] = os.environ.get(
            "VLLM_CPU_OMP_THREADS_BIND", "nobind"
        )
    return variables
