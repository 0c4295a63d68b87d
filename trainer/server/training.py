"""One training step as a transaction: journal, train, checkpoint, load, advance.

`kill -9` of the server or a worker changes nothing at any point: the journaled request is trained
again from the checkpoint before it, with the same result. The same holds after a power cut, because
the journal keeps a request until its checkpoint is synced.

Steps train one after the other, in order of admission. A step is loaded, synced and checked while
the next one trains from its checkpoint; it is served before the next one. If it cannot be served,
the steps that were trained from it fail too, and are removed before it is.
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress

from kit.types import Json
from trainer import faults
from trainer.errors import CheckpointError, NotReady, OutOfMemory, TrainerError, WorkerDied
from trainer.server.journal import JournaledRequest
from trainer.server.model import Model
from trainer.server.reports import Reports
from trainer.server.step_rows import StepRows
from trainer.server.syncing import CheckpointSync
from trainer.server.workers import Workers
from trainer.step_config import read_step_config

logger = logging.getLogger(__name__)
ATTEMPTS = 3  # a request that kills the learner this often would always kill it


class Training:
    """A step under way. It continues whether or not a client reads its rows."""

    def __init__(
        self,
        model: Model,
        request: JournaledRequest,
        workers: Workers,
        reports: Reports,
        previous: "Training | None" = None,
    ) -> None:
        self.model = model
        self.request = request
        self._workers = workers
        self._learner = workers.learner
        self._reports = reports
        self._previous = previous
        """The step before this one, until this one is served or removed."""
        self._next: Training | None = None
        if previous:
            previous._next = self
        self._turn = AsyncExitStack()
        self._alone = False
        """Whether the gate is closed for this step."""
        self._rows = StepRows()
        self._times: dict[str, float] = {}
        self._error: Exception | None = None
        self._served = False
        """Set by the one line that has served the step; without it the step has failed."""
        self._decided = asyncio.Event()
        """Whether it is known if the step is served or has failed."""
        self.sync: CheckpointSync = CheckpointSync(
            model, request.step, previous.sync if previous else None
        )
        self._tasks = [asyncio.create_task(self._run())]

    @property
    def done(self) -> bool:
        """Whether the step is served, or has failed and is removed."""
        return self._rows.ended

    @property
    def rows_so_far(self) -> list[Json]:
        return self._rows.so_far

    @property
    def error(self) -> Exception | None:
        """The error that ended the step, or None if it is served or under way."""
        if not self.done or self._served:
            return None
        return self._error or NotReady(
            f"The server stopped before step {self.request.step} was served",
            hint="Send the same request again once it is back: the step is finished, not repeated",
        )

    def answers(self, digest: str) -> bool:
        """Whether this step is the answer to a body with that digest, sent again."""
        awaited = self.model.journal.awaits(self.request.step)
        return self.request.digest == digest and awaited and self.error is None

    @property
    def failed(self) -> bool:
        """Whether the step has failed, even if it is not removed yet."""
        return self._error is not None

    def cancel(self) -> None:
        """Stop, because the server stops: the journal keeps the request."""
        for task in (*self._tasks, self.sync.task):
            if task:
                task.cancel()

    async def cancelled(self) -> None:
        """Wait until a step that was cancelled has ended."""
        tasks = [task for task in (*self._tasks, self.sync.task) if task]
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._rows.end()  # a task that never began has not done it

    async def finished(self) -> None:
        """Wait until the step is served, or has failed and is removed."""
        async for _ in self._rows.read():
            pass

    async def wait(self) -> None:
        """Wait until the step is served, and raise the error that ended it otherwise."""
        await self.finished()
        if error := self.error:
            raise error

    async def rows(self) -> AsyncIterator[Json]:
        """Yield every row of metrics, and raise the error that ended the step, if any."""
        async for row in self._rows.read():
            yield row
        if error := self.error:
            raise error

    async def _run(self) -> None:
        try:
            faults.reached("server-journaled")
            async with self._workers.steps, self._workers.learning, self._turn:
                self._check_previous()
                if self._workers.takes_turns:
                    await self._close_gate()
                started = time.monotonic()
                self._times |= self.model.pace.before_step()
                try:
                    await self._train_and_release()
                    if self._alone:
                        await self._serve()
                finally:
                    self._times |= self.model.pace.step_done()
            if not self._alone:
                await self._serve()
        except Exception as error:
            self._error = error  # first: whatever fails below, the step has failed
            self._decided.set()
            await self._undo(error)
        else:
            self._times["time/step_s"] = time.monotonic() - started
            engine_done = asyncio.Event()
            self._tasks.append(asyncio.create_task(self._check(engine_done)))
            self.sync.start()
            served = self.model, self.request, self.rows_so_far, self._times
            self._attempt(self._reports.step_served, *served)
            await engine_done.wait()
        finally:
            self.request = dataclasses.replace(self.request, groups=[])  # they may be large
            await self._rows.end()

    async def _train_and_release(self) -> None:
        try:
            await self._train_with_retries()
        except Exception:  # not CancelledError: a server that stops waits for nothing
            await self._release_memory()
            raise
        await self._release_memory()
        faults.reached("server-trained")

    async def _close_gate(self) -> None:
        """Let requests wait from here on, until the end of this step's turn."""
        if self._alone:
            return
        if self._previous:
            await self._previous._decided.wait()  # the engine loads it
            self._check_previous()
        await self._turn.enter_async_context(self._workers.gate.closed())
        self._alone = True

    def _check_previous(self) -> None:
        if self._previous and self._previous.failed:
            raise self._previous.failed_first(self.request.step)

    def failed_first(self, step: int) -> TrainerError:
        """The error of `step`, which was to be trained from this one."""
        return NotReady(
            f"Step {step} was not trained, because step {self.request.step} failed: {self._error}",
            hint="Send its request again: it is then trained from the step that is served",
        )

    async def _undo(self, error: Exception) -> None:
        """Remove what a failed step left; the next one refuses to start where that fails."""
        self._attempt(self._reports.step_failed, self.model, error)
        if self._next:
            await self._next.finished()  # a restart must not find it without this one
        # Otherwise the next step of this number would be served with these weights.
        if self.request.step > self.model.step:
            with suppress(TrainerError):
                await self._workers.unload(self.model, self.request.step)
        self._attempt(self.model.discard, self.request.step)
        self._attempt(self.model.journal.forget, self.request.step)
        self._previous = None

    def _attempt(self, action: Callable[..., object], *arguments: object) -> None:
        """Do something that cannot change any more whether the step is served."""
        try:
            action(*arguments)
        except Exception as error:
            logger.error("after step %s of %s: %s", self.request.step, self.model.key, error)

    async def _train_with_retries(self) -> None:
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
                    await self._close_gate()
                    self._learner.crowded = await self._workers.make_room()
                    if not self._learner.crowded:
                        raise
                logger.warning("training again after: %s", error.message)
        await self._train()

    async def _release_memory(self) -> None:
        if self._learner.crowded:
            await self._learner.release()

    async def _serve(self) -> None:
        """Load the step and advance, after the step before it."""
        if self._previous:
            await self._previous._decided.wait()
            self._check_previous()
        begun, step = time.monotonic(), self.request.step
        if step >= self.model.step:  # else a server that was killed has served a later one
            await self._load(step)
        self._times["time/load_s"] = time.monotonic() - begun
        self.model.step = max(step, self.model.step)  # only once it is served
        self._served = True
        self._previous = None
        self._decided.set()
        faults.reached("server-advanced")

    async def _load(self, step: int) -> None:
        """Load a step; if the engine lacks the memory to wake up, stop the learner first."""
        if not self._alone:
            async with self._workers.gate.sampling():  # the engine must not go to sleep meanwhile
                return await self._workers.load(self.model, step)
        try:
            await self._workers.load(self.model, step)
        except TrainerError as error:
            if not self._learner.crowded:
                raise
            logger.warning("restarting the learner to free memory: %s", error.message)
            await self._learner.stop()
            await self._workers.load(self.model, step)

    async def _train(self) -> None:
        """Train once; a step that has its checkpoint is not trained again."""
        step, journal = self.request.step, self.model.journal
        if await asyncio.to_thread(self.model.has_whole, step):
            self.model.add_step(step)
            return await self._rows.start_over(journal.rows(step))
        journal.restart(step)
        await self._rows.start_over()
        config = read_step_config(self.request.config)
        trained = None
        async for row in self._learner.train(
            self.model.checkpoints, journal.file(step), config, self.model.lora, parent=step - 1
        ):
            if "checkpoint" in row:
                trained = int(row["step"])
                self._times |= row.get("times", {})
                continue
            journal.row(step, row)
            faults.reached("server-row")
            await self._rows.add(row)
        if trained != step:
            raise CheckpointError(
                f"The learner made checkpoint `{trained}` of `{self.model.name}`, not `{step}`"
            )
        self.model.add_step(step)

    async def _check(self, engine_done: asyncio.Event) -> None:
        try:
            found = await self._workers.check(self.model, self.request.step, engine_done)
        except Exception as error:  # the step is served all the same
            engine_done.set()
            logger.warning("step %s was not checked: %s", self.request.step, error)
        else:
            self._reports.step_checked(self.model, self.request.step, found)
