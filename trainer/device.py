"""Where and in which precision a model computes: the same answer for engine and learner."""

from pathlib import Path

import torch

from trainer.precision import dtype_name


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def default_dtype(directory: Path, device: torch.device) -> torch.dtype:
    name = dtype_name(directory, cuda=device.type == "cuda")
    return torch.bfloat16 if name == "bfloat16" else torch.float32
