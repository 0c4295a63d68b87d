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
    """Give the streams of `worker`, a class, this priority unless they ask for one."""
    own_stream, own_init = cuda.Stream.__new__, worker.init_device

    def stream(cls: Any, device: Any = None, asked: int = 0, **others: Any) -> Any:
        chosen = others.pop("priority", asked)
        if not others:  # others name a stream that exists
            chosen = chosen or priority
        return own_stream(cls, device, chosen, **others)

    def init_device(self: Any) -> None:
        own_init(self)
        # The default stream has the lowest priority for good. vLLM leaves it too, but later.
        cuda.set_stream(cuda.Stream())

    cuda.Stream.__new__ = staticmethod(stream)
    worker.init_device = init_device


if os.environ.get(VARIABLE):
    try:
        from vllm.v1.worker.gpu_worker import Worker as GpuWorker

        install(GpuWorker, torch.cuda, int(os.environ[VARIABLE]))
    except (ImportError, AttributeError) as error:
        logger.warning("computing beside the learner, not before it: %s", error)
