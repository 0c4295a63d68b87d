"""Assignment of GPUs to the engine and the learner. Works without torch, like the server."""

import itertools
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.base_model.architecture import Architecture, read_architecture
from trainer.config import ServerConfig

logger = logging.getLogger(__name__)
_SIZES = tuple(f"{kind}_parallel_size" for kind in ("tensor", "pipeline", "data"))


def visible_gpus() -> list[str]:
    """Return the GPUs that a child process would see, as CUDA_VISIBLE_DEVICES names them."""
    found = list(Path("/dev").glob("nvidia[0-9]*"))
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    if variable is None or not found:
        return [str(number) for number in range(len(found))]
    # CUDA stops reading at an empty name or -1.
    names = (name.strip() for name in variable.split(","))
    return list(itertools.takewhile(lambda name: name not in ("", "-1"), names))


def has_cuda() -> bool:
    """Return whether a child process would see an NVIDIA GPU."""
    return bool(visible_gpus())


def assign_gpus(
    config: ServerConfig,
    model: Path,
    arguments: Mapping[str, Any],
    *,
    multi_gpu_engine: bool,
    trains: bool = True,
) -> ServerConfig:
    """Return `config` with separate GPUs for engine and learner, if there are two or more.

    Devices that `config` sets stay, and the other side gets the remaining GPUs. `arguments` are
    vLLM's; `multi_gpu_engine` is whether the engine can use more than one GPU; `trains` is whether
    this machine runs a learner.
    """
    gpus = visible_gpus()
    engine, learner = _names(config.engine_devices), _names(config.learner_devices)
    configured = engine or learner or []
    if len(gpus) < 2 or (engine and learner) or not set(configured) <= set(gpus):
        return config  # an unknown name may stand for any of the GPUs
    if engine is None:
        free = [gpu for gpu in gpus if gpu not in (learner or [])]
        most = len(free) - (trains and learner is None)
        required = gpus_required(arguments, config.engine_nodes)
        if required and required > most:
            return config  # engine and learner share all GPUs
        architecture = read_architecture(model) if multi_gpu_engine else None
        engine = free[: required or _largest_parallel_size(most, architecture)]
    if learner is None and trains:
        learner = [gpu for gpu in gpus if gpu not in engine]
        if config.quantization:
            del learner[1:]  # the fp8 kernels work in one process only
    for purpose, names in (("sampling", engine), ("training", learner)):
        if names:
            logger.info("GPUs for %s: %s", purpose, ", ".join(names))
    devices = {"engine_devices": _join(engine), "learner_devices": _join(learner)}
    return config.model_copy(update=devices)


def gpus_are_shared(config: ServerConfig) -> bool:
    """Return whether engine and learner share a GPU; one without set devices uses all of them."""
    engine, learner = _names(config.engine_devices), _names(config.learner_devices)
    return engine is None or learner is None or bool(set(engine) & set(learner))


def gpus_required(arguments: Mapping[str, Any], nodes: int = 1) -> int | None:
    """Return how many GPUs vLLM needs on each of `nodes` machines; None if no size is set."""
    given = any(isinstance(arguments.get(name), int) for name in _SIZES)
    return math.ceil(parts_of(arguments, nodes) / nodes) if given else None


def parts_of(arguments: Mapping[str, Any], nodes: int = 1) -> int:
    """Return into how many parts vLLM divides the model over `nodes` machines.

    If nothing else is set, each machine gets some of the layers, since only their output crosses
    the network.
    """
    sizes = {"pipeline_parallel_size": nodes, **arguments}
    return math.prod(size for name in _SIZES if isinstance(size := sizes.get(name), int))


def _largest_parallel_size(most: int, architecture: Architecture | None) -> int:
    """Return the largest power of two up to `most` by which vLLM can divide the model's heads."""
    best = 1
    while architecture and best * 2 <= most:
        size, kv_heads = best * 2, architecture.kv_heads
        if architecture.heads % size or (kv_heads % size and size % kv_heads):
            break
        best = size
    return best


def _names(devices: str | None) -> list[str] | None:
    return None if devices is None else devices.split(",")


def _join(names: list[str] | None) -> str | None:
    return ",".join(names) if names else None
