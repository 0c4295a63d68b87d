"""Reading vLLM's log: startup progress, and why it died. Pure functions."""

import re
from collections.abc import Sequence

_RESERVED = "KV cache size"
# Text in a log line, and the stage of startup that it marks. The last match in the log counts.
_STAGES = (
    ("Resolved architecture", "reading the model's configuration"),
    ("Initializing a V1 LLM engine", "starting the engine's processes"),
    ("Starting to load model", "loading the weights"),
    ("Loading weights took", "placing the weights"),
    ("torch.compile", "compiling the model"),
    ("Dynamo bytecode transform", "compiling the model"),
    (_RESERVED, "reserving the KV cache"),
    ("Capturing CUDA graphs", "capturing CUDA graphs"),
    ("Graph capturing finished", "warming up"),
    ("Starting vLLM", "opening its API"),
)
_PREFIX = re.compile(
    r"^(\(\w+( pid=\d+)?\) *)*((ERROR|CRITICAL|WARNING|INFO) [\d-]+ [\d:]+ \[[^\]]+\] ?)?"
)
_ERROR = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)(: .+|$)")
_USAGE = re.compile(r"error: (.+)$")
# Errors that only report that something else went wrong.
_VAGUE = ("Engine core initialization failed", "See stack trace", "root cause", "EngineDeadError")
# Files of `in_vllm` that GPUs run, in a traceback.
_OUR_KERNELS = re.compile(
    r'File "[^"]*/in_vllm/(gpu_kernels|decode_\w+|lora_\w+|sampling_kernel|token_sampling)\.py"'
)
# Kernels run after the call that starts them, so a later call reports these.
_LATE = re.compile(
    r"(CUDA error|\[CUDA\]): (an illegal memory access|misaligned address"
    r"|unspecified launch failure|an illegal instruction|device-side assert)"
)
_HINTS = (
    (
        ("No available memory for the cache",),
        "Raise `gpu_memory_utilization` in `engine_args`, or choose a smaller base model or a "
        "larger GPU",
    ),
    (
        ("out of memory", "Free memory on device"),
        "Lower `gpu_memory_utilization` or `max_model_len` in `engine_args`, or free GPU memory",
    ),
    (
        ("max seq len", "maximum model length", "max_model_len"),
        "Lower `max_model_len` in `engine_args`",
    ),
    (
        ("unrecognized arguments", "invalid choice", "invalid value", "validation error"),
        "Fix or remove that setting in `engine_args`; `vllm serve --help=all` lists them",
    ),
    (
        ("weight.dtype in [torch.float16",),
        "Remove `dtype` from `engine_args`: on a GPU vLLM supports LoRAs in bf16 and fp16 only",
    ),
    (("No module named",), "Install vLLM here, or set `ART_VLLM` to its environment"),
)


def stage(lines: Sequence[str]) -> str:
    """Return what a starting vLLM is doing."""
    for line in reversed(lines):
        for mark, description in _STAGES:
            if mark in line:
                return description
    return "importing its libraries"


def has_reserved(lines: Sequence[str]) -> bool:
    """Whether a starting vLLM has measured the GPU's memory, and reserved its share of it."""
    return any(_RESERVED in line for line in lines)


def cause(lines: Sequence[str]) -> str:
    """Return why vLLM ended: the first error that is not the consequence of another."""
    vague = asserted = ""
    for line in map(plain, lines):
        if line.startswith("assert "):
            asserted = line
        if usage := _USAGE.search(line):
            return usage[1]
        if not _ERROR.match(line):
            continue
        if line == "AssertionError" and asserted:  # name the assertion that failed
            line = f"{line}: {asserted}"
        if not any(word in line for word in _VAGUE):
            return line
        vague = vague or line
    messages = [text for line in lines if (text := plain(line))]
    for line in messages:
        if "exited unexpectedly" in line or "died unexpectedly" in line:
            return "its engine process was killed, perhaps for lack of memory"
    return vague or (messages[-1] if messages else "its log is empty")


def names_our_kernels(lines: Sequence[str]) -> bool:
    """Whether an error may be due to our kernels, which this vLLM or GPU may not support."""
    if "out of memory" in cause(lines):  # vLLM's own attention runs below ours
        return False
    return any(_OUR_KERNELS.search(line) or _LATE.search(line) for line in lines)


def hint(cause: str) -> str | None:
    """Return how to fix a known cause, or None."""
    for marks, advice in _HINTS:
        if any(mark.lower() in cause.lower() for mark in marks):
            return advice
    return None


def plain(line: str) -> str:
    """Return a log line without its process, level, time and source location."""
    return _PREFIX.sub("", line).strip()
