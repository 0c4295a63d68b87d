"""Lets vLLM compute before the learner on a GPU that both use at once, by CUDA MPS.

A GPU starts the kernels of streams with a higher priority first, whichever process they are from.
torch gives streams the lowest priority, so vLLM gets the next one, and the learner changes its own
(`trainer/learner/precedence.py`). vLLM's workers load this file, so it imports nothing of ours.
"""

import logging
import os
from typing import Any

import torch

logger = logging.getLogger("vllm.stream_priority")
VARIABLE = "ART_ENGINE_PRIORITY"  # set by `trainer/processes/mps.py`; lower numbers come first


class Worker:
    """What vLLM adds to its workers: nothing."""


def install(worker: Any, cuda: Any, priority: int) -> None:
    """Give streams this priority unless one is requested, and `worker`, a class, such a stream."""
    own_stream, own_init = cuda.Stream.__new__, worker.init_device

    def create(cls: Any, device: Any = None, requested: int | None = None, **others: Any) -> Any:
        requested = others.pop("priority", requested)
        if requested is None:
            requested = 0 if others else priority  # others name a stream that exists
        return own_stream(cls, device, requested, **others)

    def init_device(self: Any) -> None:
        own_init(self)
        # The default stream has the lowest priority for good. vLLM leaves it too, but later.
        stream = cuda.Stream()
        stream.wait_stream(cuda.current_stream())
        cuda.set_stream(stream)

    cuda.Stream.__new__ = staticmethod(create)
    worker.init_device = init_device


if os.environ.get(VARIABLE):
    try:
        from vllm.v1.worker.gpu_worker import Worker as GpuWorker

        install(GpuWorker, torch.cuda, int(os.environ[VARIABLE]))
    except (ImportError, AttributeError) as error:
        logger.warning("vLLM has no priority, so the learner may compute before it: %s", error)
