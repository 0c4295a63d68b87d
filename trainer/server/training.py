"""One training step as a transaction: journal, train, checkpoint, load, advance.

`kill -9` of the server or a worker changes nothing at any point: the journaled request is trained
again from the checkpoint before it, with the same result. A power cut changes nothing either: the
checkpoint is synced while the next rollouts run, and the journal keeps its request until then.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator

from kit.types import Json
from trainer import checkpoint, faults
from trainer.config import read_step_config
from trainer.errors import OutOfMemory, TrainerError, WorkerDied
from trainer.server.journal import JournaledRequest
from trainer.server.models import Model
from trainer.server.reports import Reports
from trainer.server.workers import Workers

logger = logging.getLogger(__name__)
ATTEMPTS = 3  # a request that kills the learner this often would always kill it


class Training:
    """A step under way. It continues whether or not a client reads its rows."""

    def __init__(
        self, model: Model, request: JournaledRequest, workers: Workers, reports: Reports
    ) -> None:
        self.model = model
        self.request = request
        self._workers = workers
        self._learner = workers.learner
        self._reports = reports
        self._rows: list[Json] = []
        self._times: dict[str, float] = {}
        self._changed = asyncio.Condition()
        self._error: Exception | None = None
        self.done = False
        self._syncing: asyncio.Task[None] | None = None
        self._tasks = [asyncio.create_task(self._run())]

    @property
    def rows_so_far(self) -> list[Json]:
        return self._rows

    @property
    def error(self) -> Exception | None:
        """The error that ended the step, or None."""
        return self._error

    async def cancel(self) -> None:
        """Stop, because the server stops: the journal keeps the request."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def wait(self) -> None:
        """Wait until the step is served, and raise the error that ended it otherwise."""
        async for _ in self.rows():
            pass

    async def synced(self) -> None:
        """Wait until a finished step survives a power cut."""
        if self._syncing and self._syncing.done() and self._syncing.exception():
            self._start_sync()  # the disk may have room again
        if self._syncing:
            await asyncio.shield(self._syncing)

    async def rows(self) -> AsyncIterator[Json]:
        """Yield every row of metrics from the first on, even if the step is over already."""
        count = 0
        while not self.done or count < len(self._rows):
            await self._wait_for_row(count)
            # A second attempt starts the rows over, with the same values.
            new = self._rows[count:]
            count += len(new)
            for row in new:
                yield row
        if self._error:
            raise self._error

    async def _wait_for_row(self, index: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.done or len(self._rows) > index)

    async def _run(self) -> None:
        started = time.monotonic()
        try:
            faults.reached("server-journaled")
            async with self._workers.gate.training():
                try:
                    step = await self._train_with_retries()
                except Exception:  # not CancelledError: a server that stops waits for nothing
                    await self._release_memory()
                    raise
                await self._release_memory()
                faults.reached("server-trained")
                trained = time.monotonic()
                await self._serve(step)
                self._times["time/load_s"] = time.monotonic() - trained
                self.model.step = step  # only once it is served
                faults.reached("server-advanced")
            self._start_sync()
            self._times["time/step_s"] = time.monotonic() - started
            self._tasks.append(asyncio.create_task(self._check()))
            self._reports.step_served(self.model, self.request, self._rows, self._times)
        except Exception as error:
            self._reports.step_failed(self.model, error)
            # Otherwise the next request would take this checkpoint for its own.
            self.model.discard(self.request.step)
            self.model.journal.forget()
            self._error = error
        finally:
            self.done = True
            await self._notify()

    async def _train_with_retries(self) -> int:
        """Train, and retry if the learner dies or the step does not fit the GPU.

        The learner keeps less in memory at the second attempt. If that is not enough, the engine
        sleeps during this step and all later ones.
        """
        if self._learner.crowded:
            self._learner.crowded = await self._workers.make_room()
        for attempt in range(1, ATTEMPTS):
            try:
                return await self._train()
            except WorkerDied as error:
                logger.warning("training again after: %s", error.message)
            except OutOfMemory as error:
                if attempt > 1:
                    self._learner.crowded = await self._workers.make_room()
                    if not self._learner.crowded:
                        raise
                logger.warning("training again after: %s", error.message)
        return await self._train()

    async def _release_memory(self) -> None:
        if self._learner.crowded:
            await self._learner.release()

    async def _serve(self, step: int) -> None:
        """Load a step; if the engine lacks the memory to wake up, stop the learner first."""
        try:
            await self._workers.load(self.model, step)
        except TrainerError as error:
            if not self._learner.crowded:
                raise
            logger.warning("restarting the learner to free memory: %s", error.message)
            await self._learner.stop()
            await self._workers.load(self.model, step)

    async def _train(self) -> int:
        """Train once and return the step; a step that has its checkpoint is not trained again."""
        if await asyncio.to_thread(self.model.has_whole, self.request.step):
            self.model.add_step(self.request.step)
            self._rows = self.model.journal.rows()
            await self._notify()
            return self.request.step
        self.model.journal.restart()
        self._rows = []
        config = read_step_config(self.request.config)
        step = self.request.step
        async for row in self._learner.train(
            self.model.checkpoints, self.request.groups, config, self.model.lora
        ):
            if "checkpoint" in row:
                step = int(row["step"])
                self._times |= row.get("times", {})
                continue
            self._rows.append(row)
            self.model.journal.row(row)
            faults.reached("server-row")
            await self._notify()
        self.model.add_step(step)
        return step

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _start_sync(self) -> None:
        self._syncing = asyncio.create_task(self._sync())
        self._tasks.append(self._syncing)

    async def _sync(self) -> None:
        await asyncio.to_thread(checkpoint.sync, self.model.path(self.request.step))
        self.model.journal.synced()

    async def _check(self) -> None:
        """Compare engine and learner. It samples, so the next step waits until it ends."""
        try:
            async with self._workers.gate.sampling():
                found = await self._workers.check(self.model)
        except Exception as error:  # the step is served all the same
            logger.warning("step %s was not checked: %s", self.model.step, error)
            return
        self._reports.step_checked(self.model, found)
