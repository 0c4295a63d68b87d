"""The device, precision and memory of a model, the same for the engine and the learner."""

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
    """Total bytes of `device`. On a CPU, the bytes that this process may use."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *_cgroup_limits()])


def _cgroup_limits(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Iterator[int]:
    """Memory limits, in bytes, of every cgroup of this process: a container's, a Slurm job's."""
    lines = membership.read_text().splitlines() if membership.is_file() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and "memory" not in controllers.split(","):
            continue
        top, name = root, "memory.max"
        if controllers:  # cgroups v1
            top, name = root / "memory", "memory.limit_in_bytes"
        inner = top / path.strip("/")
        for group in {top, inner, *inner.parents} - {*top.parents}:
            with contextlib.suppress(OSError, ValueError):  # not visible from here, or no limit
                yield int((group / name).read_text())


def keep_freed_memory() -> None:
    """Keep memory that this process frees for reuse instead of returning it to the system.

    A training step frees and allocates the same tensors again and again. The kernel spent a tenth
    of the step clearing their pages.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    trim_threshold, mmap_threshold, gibibyte = -1, -3, 1 << 30
    for option in (trim_threshold, mmap_threshold):
        ctypes.CDLL(None).mallopt(option, gibibyte)


def release_memory() -> None:
    """Return GPU memory that torch has reserved but not used, so another process can have it."""
    gc.collect()
    torch.cuda.empty_cache()
