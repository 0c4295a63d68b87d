"""This machine's part of a learner whose first process is on another one.

torchrun's agent and its processes leave when their world breaks, as after the death of any of
them, and are started again here to join the next one.
"""

import asyncio
import contextlib
import logging
import os
import sys
from pathlib import Path

from trainer.learner.process import MODULE, arguments
from trainer.processes.worker import PARENT_VARIABLE, visible

logger = logging.getLogger(__name__)
AGAIN_AFTER = 1.0  # seconds


class Peers:
    """Keeps the processes joined until `stop`; `log` is where their output goes."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._environment: dict[str, str] = {}
        self._command: list[str] = []
        self._task: asyncio.Task[None] | None = None

    async def join(
        self, base_model: str, devices: str | None, *, number: int, nodes: int, master: str
    ) -> None:
        """Be machine `number` of `nodes`; the same again changes nothing."""
        start = [sys.executable, "-m", MODULE]
        command = [*start, *arguments(base_model, nodes=nodes, number=number, master=master)]
        environment = visible(devices)
        if (command, environment) == (self._command, self._environment):
            return
        await self.stop()
        self._command, self._environment = command, environment
        self._task = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        self._command = []
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        while True:
            with self._log.open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={
                        **os.environ,
                        **self._environment,
                        PARENT_VARIABLE: str(os.getpid()),
                    },
                )
            try:
                logger.info("a learner process joins (pid %s)", process.pid)
                code = await process.wait()
            except asyncio.CancelledError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
                raise
            logger.warning("the learner process left with code %s; see `%s`", code, self._log)
            await asyncio.sleep(AGAIN_AFTER)
