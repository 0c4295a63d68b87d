"""The precision that a model computes in, the same for the learner and all engines. No torch."""

from pathlib import Path
from typing import Literal

from trainer.base_model.json_files import read_object


def dtype_name(directory: Path, *, cuda: bool) -> Literal["bfloat16", "float32"]:
    """bf16 on a GPU, because vLLM has LoRA kernels for it; on a CPU only where bf16 is fast."""
    if cuda:
        return "bfloat16"
    config = read_object(directory / "config.json")
    stored = config.get("dtype") or config.get("torch_dtype") or "float32"
    if stored in ("bfloat16", "float16") and _cpu_has_amx():
        return "bfloat16"
    return "float32"


def _cpu_has_amx() -> bool:
    try:
        return " amx_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
