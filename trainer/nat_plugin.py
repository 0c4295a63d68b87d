"""A NAT plugin that restores `art.TrainableModel.train`, which openpipe-art has dropped.

NVIDIA's NeMo Agent Toolkit 1.9 trains with `model.train(...)`, which openpipe-art 0.5.18 no longer
has. NAT loads this module through the entry point `nat.components`, before any workflow.
"""

import logging
import time
from collections.abc import Iterable
from typing import Any

logger = logging.getLogger(__name__)


async def train(
    self: Any,
    trajectory_groups: Iterable[Any],
    config: Any = None,
    _config: Any = None,
    verbose: bool = False,
) -> None:
    """Train one step on the model's backend and log it, as openpipe-art 0.5.17 does."""
    from art.metrics_taxonomy import average_metric_samples
    from art.types import TrainConfig

    groups = list(trajectory_groups)
    started = time.monotonic()
    rows = [
        row
        async for row in self.backend()._train_model(
            self, groups, config or TrainConfig(), _config or {}, verbose
        )
    ]
    metrics = average_metric_samples(rows)
    metrics.setdefault("time/step_trainer_s", time.monotonic() - started)
    step = await self.get_step()
    await self.log(groups, split="train", metrics=metrics, step=step)


def install() -> None:
    """Add `train` to `art.TrainableModel`, unless this openpipe-art still has it."""
    try:
        from art import TrainableModel
    except ImportError:
        return  # NAT without ART
    if not hasattr(TrainableModel, "train"):
        TrainableModel.train = train
        logger.debug("restored TrainableModel.train")


install()
