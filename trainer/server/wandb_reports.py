"""Metrics of every model to Weights & Biases, where its key is set: a run for each model.

wandb lives in a process of its own (`wandb_worker`). It may be slow, its service away or its key
wrong: rows wait for it in a queue, steps never do.
"""

import asyncio
import contextlib
import importlib.util
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kit.state_dir import LOGS
from kit.types import Json
from trainer.errors import TrainerError
from trainer.processes.worker import Worker

logger = logging.getLogger(__name__)
PATIENCE = 10.0  # seconds that a server which stops gives the last rows


class Reports:
    """Takes rows at once and sends them behind everyone's back. Without a key it does nothing."""

    def __init__(self, key: str | None, state: Path) -> None:
        if key and not is_installed():
            logger.warning(
                "`WANDB_API_KEY` is set but `wandb` is not installed here: metrics go to "
                "`history.jsonl` alone; `pip install wandb` brings them to W&B"
            )
            key = None
        self._key = key
        self._state = state
        self._worker = Worker(
            "W&B", "trainer.server.wandb_worker", [], log=state / LOGS / "wandb.log"
        )
        self._rows: asyncio.Queue[Json] = asyncio.Queue()
        self._sending: asyncio.Task[None] | None = None
        self._told: set[str] = set()

    def add(self, project: str, name: str, step: int, numbers: Mapping[str, Any]) -> None:
        """Report `numbers` of a model's step; what is no finite number is left out."""
        if self._key is None:
            return
        finite = {
            key: value
            for key, value in numbers.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        row = {"project": project, "name": name, "numbers": {**finite, "training_step": step}}
        self._rows.put_nowait(row)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())

    async def stop(self) -> None:
        """Send what is left, for as long as `PATIENCE` lasts."""
        sending, self._sending = self._sending, None
        if sending is None:
            return
        with contextlib.suppress(TimeoutError, TrainerError, OSError):
            async with asyncio.timeout(PATIENCE):
                await self._rows.join()
                await self._worker.call("finish")
        sending.cancel()
        await self._worker.stop()

    async def _send(self) -> None:
        while True:
            row = await self._rows.get()
            try:
                if self._worker.pid is None:
                    await self._worker.start()
                await self._worker.revive()
                place = await self._worker.call(
                    "log", key=self._key, directory=str(self._state), **row
                )
                self._tell(f"{row['project']}/{row['name']} at W&B: {place}", logging.INFO)
            except (TrainerError, OSError) as error:
                cause = error.message if isinstance(error, TrainerError) else str(error)
                self._tell(f"metrics do not reach W&B: {cause}", logging.WARNING)
            finally:
                self._rows.task_done()

    def _tell(self, message: str, level: int) -> None:
        """Once: the same holds for every step."""
        if message not in self._told:
            self._told.add(message)
            logger.log(level, "%s", message)


def is_installed() -> bool:
    """Whether there is a wandb. A directory of that name, where wandb keeps its runs, is none."""
    found = importlib.util.find_spec("wandb")
    return found is not None and found.origin is not None
