"""Reading vLLM's log: how far its start is, and what it died of. Pure functions."""

import re
from collections.abc import Sequence

# What a line says about a start under way; of several, the last one that was logged counts.
_STAGES = (
    ("Resolved architecture", "reading the model's configuration"),
    ("Initializing a V1 LLM engine", "starting the engine's processes"),
    ("Starting to load model", "loading the weights"),
    ("Loading weights took", "placing the weights"),
    ("torch.compile", "compiling the model"),
    ("Dynamo bytecode transform", "compiling the model"),
    ("KV cache size", "reserving the KV cache"),
    ("Capturing CUDA graphs", "capturing CUDA graphs"),
    ("Graph capturing finished", "warming up"),
    ("Starting vLLM", "opening its API"),
)
_PREFIX = re.compile(
    r"^(\(\w+( pid=\d+)?\) *)*((ERROR|CRITICAL|WARNING|INFO) [\d-]+ [\d:]+ \[[^\]]+\] ?)?"
)
_ERROR = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)(: .+|$)")
_USAGE = re.compile(r"error: (.+)$")
# These say only that something else went wrong.
_VAGUE = ("Engine core initialization failed", "See stack trace", "root cause", "EngineDeadError")
_HINTS = (
    (
        ("No available memory for the cache",),
        "Raise `gpu_memory_utilization` in `engine_args`, or choose a smaller base model or a "
        "larger card",
    ),
    (
        ("out of memory", "Free memory on device"),
        "Lower `gpu_memory_utilization` or `max_model_len` in `engine_args`, or free the card",
    ),
    (
        ("max seq len", "maximum model length", "max_model_len"),
        "Lower `max_model_len` in `engine_args`",
    ),
    (
        ("unrecognized arguments", "invalid choice", "invalid value", "validation error"),
        "Mend or remove that setting in `engine_args`; `vllm serve --help=all` lists them",
    ),
    (
        ("weight.dtype in [torch.float16",),
        "Remove `dtype` from `engine_args`: on a GPU vLLM has LoRAs in bf16 and fp16 only",
    ),
    (("No module named",), "Install vLLM here, or name its environment in `ART_VLLM`"),
)


def stage(lines: Sequence[str]) -> str:
    """What a starting vLLM is doing, in words."""
    for line in reversed(lines):
        for mark, words in _STAGES:
            if mark in line:
                return words
    return "importing its libraries"


def cause(lines: Sequence[str]) -> str:
    """The line that says why vLLM ended: the first error that is not a consequence of another."""
    vague = asserted = ""
    for line in map(plain, lines):
        if line.startswith("assert "):
            asserted = line
        if usage := _USAGE.search(line):
            return usage[1]
        if not _ERROR.match(line):
            continue
        if line == "AssertionError" and asserted:  # it says nothing by itself
            line = f"{line}: {asserted}"
        if not any(word in line for word in _VAGUE):
            return line
        vague = vague or line
    said = [text for line in lines if (text := plain(line))]
    for line in said:
        if "exited unexpectedly" in line or "died unexpectedly" in line:
            return "its engine process was killed, perhaps for lack of memory"
    return vague or (said[-1] if said else "it said nothing")


def hint(cause: str) -> str | None:
    """What to do about a cause, when it is one that we know."""
    for marks, words in _HINTS:
        if any(mark.lower() in cause.lower() for mark in marks):
            return words
    return None


def plain(line: str) -> str:
    """A line of the log without process, level, time and place."""
    return _PREFIX.sub("", line).strip()
