"""This machine's processes of a learner whose first process runs on another machine.

When any process of the learner dies, torchrun's agent and its processes exit everywhere. This
module starts them again, so that they join the next world.
"""

import asyncio
import contextlib
import logging
import os
import sys
from pathlib import Path

from trainer.learner.process import MODULE, arguments
from trainer.processes.worker import (
    PARENT_VARIABLE,
    environment_without_keys,
    gpu_environment,
)

logger = logging.getLogger(__name__)
RESTART_DELAY = 1.0  # seconds


class Peers:
    """Keep this machine's learner processes running until `stop`; their output goes to `log`."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._environment: dict[str, str] = {}
        self._command: list[str] = []
        self._task: asyncio.Task[None] | None = None

    async def join(
        self, base_model: str, devices: str | None, *, number: int, nodes: int, master: str
    ) -> None:
        """Join as machine `number` of `nodes`. Repeating the same call has no effect."""
        start = [sys.executable, "-P", "-m", MODULE]
        command = [*start, *arguments(base_model, nodes=nodes, number=number, master=master)]
        environment = gpu_environment(devices)
        if (command, environment) == (self._command, self._environment):
            return
        await self.stop()
        self._command, self._environment = command, environment
        self._task = asyncio.create_task(self._keep_running())

    async def stop(self) -> None:
        self._command = []
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep_running(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        while True:
            with self._log.open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={
                        **environment_without_keys(),
                        **self._environment,
                        PARENT_VARIABLE: str(os.getpid()),
                    },
                )
            try:
                logger.info("starting a learner process (pid %s)", process.pid)
                code = await process.wait()
            except asyncio.CancelledError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
                raise
            logger.warning("the learner process exited with code %s; see `%s`", code, self._log)
            await asyncio.sleep(RESTART_DELAY)
