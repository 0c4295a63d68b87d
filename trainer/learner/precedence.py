"""`Precedence`: how much of a GPU the learner takes from the engine that it shares it with.

A learner that comes behind every request may be the slower of the two. Then steps wait to be
trained, the runs that may be sampled ahead have all begun, and the engine's batches become small.
With the engine's priority the learner may be the faster one, and waits for its next step. So it
computes some rows at one priority and some at the other, and adjusts their share until the next
step's request arrives in the middle of a step.

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
GAIN = 0.5  # a step changes the share of rows by at most half of this


class Precedence:
    """Changes the priority of the learner's stream from row to row."""

    def __init__(self, change: Callable[[int], None], engine: int) -> None:
        """`engine` is the priority of the engine's streams."""
        self._change = change
        self._engine = engine
        self._now = LOWEST
        self._share = 0.0
        """The share of rows that are computed at the engine's priority."""
        self._due = 0.0
        self._rows = self._waited = 0
        """Rows of the step so far, and those for which the next step's request was there."""

    @classmethod
    def from_environment(cls, device: torch.device) -> Self | None:
        """Compute on a stream of this process's own from now on, if the server uses CUDA MPS."""
        engine = os.environ.get(PRIORITY_VARIABLE)
        if engine is None or device.type != "cuda":
            return None
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # the default one has none
        torch.cuda.set_stream(stream)
        return cls(_changing(stream.cuda_stream), int(engine))

    def next_step(self) -> None:
        """Choose the share of rows for a step by what was seen in the one before."""
        if self._rows:
            moved = self._share + GAIN * (self._waited / self._rows - 0.5)
            self._share = min(1.0, max(0.0, moved))
            logger.info("rows at the engine's priority: %.0f%%", 100 * self._share)
        self._rows = self._waited = 0

    def next_row(self, waits: bool) -> None:
        """Choose the priority of a row; `waits` is whether the next step's request is there."""
        self._rows += 1
        self._waited += waits
        self._due += self._share
        ours = self._due >= 1
        self._due -= ours
        wanted = self._engine if ours else LOWEST
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
