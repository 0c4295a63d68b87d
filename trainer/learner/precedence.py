"""`Precedence`: whether gradients or requests come first on a GPU that learner and engine share.

Requests do, as long as the engine is the slower of the two. Once the next step's request waits, the
learner is: whatever is sampled sooner only waits longer to be trained, and once all runs that may
be sampled ahead have begun, the engine's batches become small. From then on the learner computes at
the engine's priority.

Only with CUDA MPS: otherwise a GPU computes for one process at a time.
"""

import logging
import os
from collections.abc import Callable
from typing import Self

import torch

from trainer.processes.mps import PRIORITY_VARIABLE

logger = logging.getLogger(__name__)
LOWEST = 0  # every stream's priority by default; lower numbers come first


class Precedence:
    """Changes the priority of the learner's stream."""

    def __init__(self, change: Callable[[int], None], engine: int) -> None:
        """`engine` is the priority of the engine's streams."""
        self._change = change
        self._engine = engine
        self._now = LOWEST

    @classmethod
    def from_environment(cls, device: torch.device) -> Self | None:
        """Compute on a stream of this process's own from now on, if the server uses CUDA MPS."""
        engine = os.environ.get(PRIORITY_VARIABLE)
        if engine is None or device.type != "cuda":
            return None
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # the default one has none
        torch.cuda.set_stream(stream)
        return cls(_changing(stream.cuda_stream), int(engine))

    def take(self, waits: bool) -> None:
        """Compute at the engine's priority if the next step waits, otherwise at the lowest one."""
        wanted = self._engine if waits else LOWEST
        if wanted != self._now:
            self._change(wanted)
            self._now = wanted


def _changing(stream: int) -> Callable[[int], None]:
    from cuda.bindings import driver  # comes with torch for GPUs only

    attribute = driver.CUstreamAttrID.CU_LAUNCH_ATTRIBUTE_PRIORITY

    def change(priority: int) -> None:
        value = driver.CUstreamAttrValue()
        value.priority = priority
        (status,) = driver.cuStreamSetAttribute(stream, attribute, value)
        if status != driver.CUresult.CUDA_SUCCESS:
            logger.warning("the learner's stream has no priority %s: %s", priority, status)

    return change
