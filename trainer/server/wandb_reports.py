"""Sends metrics to Weights & Biases if its key is set, with one W&B run for each model.

wandb has its own process (`wandb_worker`). It may be slow, its service down or its key wrong:
rows wait for it in a queue, steps never do.
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
PATIENCE = 10.0  # seconds that a stopping server waits for the last rows


class WandbReports:
    """Queues rows and sends them in the background. Without a key it does nothing."""

    def __init__(self, key: str | None, state: Path) -> None:
        if key and not is_installed():
            logger.warning(
                "`WANDB_API_KEY` is set but `wandb` is not installed: metrics only go to "
                "`history.jsonl`; to send them to W&B too, run `pip install wandb`"
            )
            key = None
        self._key = key
        self._state = state
        self._worker = Worker(
            "W&B", "trainer.server.wandb_worker", [], log=state / LOGS / "wandb.log"
        )
        self._rows: asyncio.Queue[Json] = asyncio.Queue()
        self._sending: asyncio.Task[None] | None = None
        self._logged: set[str] = set()

    def send(self, project: str, name: str, step: int, numbers: Mapping[str, Any]) -> None:
        """Queue the `numbers` of a model's step; values that are not finite numbers are skipped."""
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
            self._sending = asyncio.create_task(self._send_rows())

    async def stop(self) -> None:
        """Send the remaining rows, for at most `PATIENCE` seconds."""
        sending, self._sending = self._sending, None
        if sending is None:
            return
        with contextlib.suppress(TimeoutError, TrainerError, OSError):
            async with asyncio.timeout(PATIENCE):
                await self._rows.join()
                await self._worker.call("finish")
        sending.cancel()
        await self._worker.stop()

    async def _send_rows(self) -> None:
        while True:
            row = await self._rows.get()
            try:
                if self._worker.pid is None:
                    await self._worker.start()
                await self._worker.revive()
                place = await self._worker.call(
                    "log", key=self._key, directory=str(self._state), **row
                )
                self._log_once(f"{row['project']}/{row['name']} at W&B: {place}", logging.INFO)
            except (TrainerError, OSError) as error:
                cause = error.message if isinstance(error, TrainerError) else str(error)
                self._log_once(f"metrics do not reach W&B: {cause}", logging.WARNING)
            finally:
                self._rows.task_done()

    def _log_once(self, message: str, level: int) -> None:
        if message not in self._logged:
            self._logged.add(message)
            logger.log(level, "%s", message)


def is_installed() -> bool:
    """Whether wandb can be imported. A directory `wandb` that holds its runs does not count."""
    found = importlib.util.find_spec("wandb")
    return found is not None and found.origin is not None
