"""Where and in which precision a model computes: the same answer for engine and learner."""

import json
from pathlib import Path

import torch


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def default_dtype(directory: Path, device: torch.device) -> torch.dtype:
    """The dtype of the stored weights where the hardware multiplies it fast, else fp32."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    stored = config.get("dtype") or config.get("torch_dtype") or "float32"
    if stored in ("bfloat16", "float16") and (device.type == "cuda" or _cpu_has_amx()):
        return torch.bfloat16
    return torch.float32


def _cpu_has_amx() -> bool:
    try:
        return " amx_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
