"""Which GPUs sample and which train. Found without torch, which the server does not hold."""

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


def visible_gpus() -> list[str]:
    """The GPUs that a process started from here would see, as CUDA_VISIBLE_DEVICES names them."""
    found = list(Path("/dev").glob("nvidia[0-9]*"))
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None or not found:
        return [str(number) for number in range(len(found))]
    # CUDA reads no further than one of these.
    names = (name.strip() for name in named.split(","))
    return list(itertools.takewhile(lambda name: name not in ("", "-1"), names))


def has_cuda() -> bool:
    """Whether a process started from here would see an NVIDIA card."""
    return bool(visible_gpus())


def assign_gpus(
    config: ServerConfig,
    model: Path,
    arguments: Mapping[str, Any],
    *,
    several: bool,
    trains: bool = True,
) -> ServerConfig:
    """`config` with GPUs of its own for each, where there are two or more and nobody chose.

    `arguments` are vLLM's, `several` is whether the engine can use more than one GPU, and `trains`
    whether there is a learner on this machine. Who chose for one leaves the rest to the other.
    """
    cards = visible_gpus()
    engine, learner = _names(config.engine_devices), _names(config.learner_devices)
    given = engine or learner or []
    if len(cards) < 2 or (engine and learner) or not set(given) <= set(cards):
        return config  # a card that is named otherwise may be any of them
    if engine is None:
        left = [card for card in cards if card not in (learner or [])]
        most = len(left) - (trains and learner is None)
        asked = gpus_required(arguments)
        if asked and asked > most:
            return config  # all of them, shared
        engine = left[: asked or _largest(most, read_architecture(model) if several else None)]
    if learner is None and trains:
        learner = [card for card in cards if card not in engine]
        if config.quantization:
            del learner[1:]  # its kernels are those of one process
    told = " and ".join(
        f"{', '.join(names)} {does}"
        for names, does in ((engine, "sample"), (learner, "train"))
        if names
    )
    logger.info("of the GPUs %s, %s", ", ".join(cards), told)
    chosen = {"engine_devices": _join(engine), "learner_devices": _join(learner)}
    return config.model_copy(update=chosen)


def gpus_are_shared(config: ServerConfig) -> bool:
    """Whether engine and learner have a GPU in common; each has all of them unless it is told."""
    engine, learner = _names(config.engine_devices), _names(config.learner_devices)
    return engine is None or learner is None or bool(set(engine) & set(learner))


def gpus_required(arguments: Mapping[str, Any]) -> int | None:
    """How many GPUs vLLM needs with these arguments; None when they do not say."""
    sizes = [arguments.get(f"{kind}_parallel_size") for kind in ("tensor", "pipeline", "data")]
    given = [size for size in sizes if isinstance(size, int)]
    return math.prod(given) if given else None


def _largest(most: int, architecture: Architecture | None) -> int:
    """The largest power of two, at most `most`, into which vLLM can divide the model's heads."""
    best = 1
    while architecture and best * 2 <= most:
        size, groups = best * 2, architecture.kv_heads
        if architecture.heads % size or (groups % size and size % groups):
            break
        best = size
    return best


def _names(devices: str | None) -> list[str] | None:
    return None if devices is None else devices.split(",")


def _join(names: list[str] | None) -> str | None:
    return ",".join(names) if names else None
