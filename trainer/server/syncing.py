"""Syncs the checkpoint of a served step to disk, while the next rollouts run."""

import asyncio

from trainer import checkpoint
from trainer.server.model import Model


class CheckpointSync:
    """The sync of one step. It ends after that of the step before: a power cut takes the newest."""

    def __init__(self, model: Model, step: int, previous: "CheckpointSync | None") -> None:
        self._model = model
        self._step = step
        self._previous = previous
        self.task: asyncio.Task[None] | None = None

    @property
    def failed(self) -> bool:
        task = self.task
        return bool(task and task.done() and not task.cancelled() and task.exception())

    def start(self) -> None:
        self.task = asyncio.create_task(self._run())

    async def ended(self) -> None:
        """Wait until a served step survives a power cut, and try again if that has failed."""
        if self.failed:
            self.start()  # the disk may have room again
        if self.task:
            await asyncio.shield(self.task)

    async def _run(self) -> None:
        if self._previous:
            await self._previous.ended()
            self._previous = None
        await asyncio.to_thread(checkpoint.sync, self._model.path(self._step))
        self._model.journal.synced(self._step)
