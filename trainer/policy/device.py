"""Where and in which precision a model computes: the same answer for engine and learner."""

import contextlib
import ctypes
import gc
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import torch

from trainer.base_model.precision import dtype_name


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def default_dtype(directory: Path, device: torch.device) -> torch.dtype:
    name = dtype_name(directory, cuda=device.type == "cuda")
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def memory(device: torch.device) -> int:
    """Bytes that `device` has in all; of a machine's, what this process may take."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *_cgroup_limits()])


def _cgroup_limits(
    told: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Iterator[int]:
    """Bytes that each group this process is in may take: a container's, a Slurm job's."""
    lines = told.read_text().splitlines() if told.is_file() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and "memory" not in controllers.split(","):
            continue
        top, name = root, "memory.max"
        if controllers:  # the first version of cgroups
            top, name = root / "memory", "memory.limit_in_bytes"
        inner = top / path.strip("/")
        for group in {top, inner, *inner.parents} - {*top.parents}:
            with contextlib.suppress(OSError, ValueError):  # not seen from here, or no limit
                yield int((group / name).read_text())


def keep_freed_memory() -> None:
    """Have this process reuse what it frees, and not hand it back to the system at once.

    A training step frees and takes the same tensors again and again; a tenth of it went into
    pages that the kernel cleared anew each time.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    trim_threshold, mmap_threshold, gibibyte = -1, -3, 1 << 30
    for option in (trim_threshold, mmap_threshold):
        ctypes.CDLL(None).mallopt(option, gibibyte)


def release_memory() -> None:
    """Give back the GPU memory that torch holds without using it: another process needs it."""
    gc.collect()
    torch.cuda.empty_cache()
