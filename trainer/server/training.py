"""One training step as a transaction: journal, train, checkpoint, load, advance.

`kill -9` of the server or of a worker at any point changes nothing: the journaled request is
trained again from the checkpoint before it, and gives the same one. Nor does a power cut: the
checkpoint is synced while the next rollouts run, and its request stays in the journal until then.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from kit.types import Json
from trainer import checkpoint, faults
from trainer.config import read_step_config
from trainer.errors import OutOfMemory, TrainerError, WorkerDied
from trainer.learner.process import LearnerProcess
from trainer.server import history
from trainer.server.gate import Gate
from trainer.server.journal import Request
from trainer.server.ledger import choices_of
from trainer.server.models import Model
from trainer.server.prometheus import Metrics
from trainer.server.wandb_reports import Reports

logger = logging.getLogger(__name__)
ATTEMPTS = 3  # a learner that dies so often on one request would die on it for ever


class Training:
    """A step under way: it goes on whether or not a client listens to its rows."""

    def __init__(
        self,
        model: Model,
        request: Request,
        learner: LearnerProcess,
        gate: Gate,
        load: Callable[[Model, int], Awaitable[None]],
        check: Callable[[Model], Awaitable[dict[str, float]]],
        make_room: Callable[[], Awaitable[bool]],
        metrics: Metrics,
        reports: Reports,
    ) -> None:
        self.model = model
        self.request = request
        self._learner = learner
        self._gate = gate
        self._load = load
        self._check = check
        self._make_room = make_room
        self._metrics = metrics
        self._reports = reports
        self._rows: list[Json] = []
        self._times: dict[str, float] = {}
        self._changed = asyncio.Condition()
        self._error: Exception | None = None
        self.done = False
        self._syncing: asyncio.Task[None] | None = None
        self._tasks = [asyncio.create_task(self._run())]

    @property
    def told(self) -> list[Json]:
        """The rows of metrics so far."""
        return self._rows

    @property
    def error(self) -> Exception | None:
        """What ended the step, where it ended badly."""
        return self._error

    async def cancel(self) -> None:
        """Only for a server that stops: the journal keeps the request."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def wait(self) -> None:
        """Until the step is served; raises what ended it otherwise."""
        async for _ in self.rows():
            pass

    async def synced(self) -> None:
        """Until the step, if it was made, outlives a power cut."""
        if self._syncing and self._syncing.done() and self._syncing.exception():
            self._start_sync()  # the disk may have room again
        if self._syncing:
            await asyncio.shield(self._syncing)

    async def rows(self) -> AsyncIterator[Json]:
        """The rows of metrics from the first on, however late one asks."""
        told = 0
        while not self.done or told < len(self._rows):
            await self._news(told)
            # After a second attempt the rows begin anew; they are the same ones.
            fresh = self._rows[told:]
            told += len(fresh)
            for row in fresh:
                yield row
        if self._error:
            raise self._error

    async def _news(self, told: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.done or len(self._rows) > told)

    async def _run(self) -> None:
        started = time.monotonic()
        try:
            faults.reached("server-journaled")
            async with self._gate.training():
                try:
                    step = await self._train_until_made()
                except Exception:  # not when the server stops, which waits for nothing
                    await self._give_room_back()
                    raise
                await self._give_room_back()
                faults.reached("server-trained")
                trained = time.monotonic()
                await self._serve(step)
                self._times["time/load_s"] = time.monotonic() - trained
                self.model.step = step  # served, and only then
                faults.reached("server-advanced")
            self._start_sync()
            self._tell(time.monotonic() - started)
            self._tasks.append(asyncio.create_task(self._compare()))
        except Exception as error:
            logger.error("training %s failed: %s", self.model.key, error)
            self._metrics.add("art_failed_steps_total", model=self.model.key)
            self.model.discard(self.request.step)  # else the next request would find it made
            self.model.journal.forget()
            self._error = error
        finally:
            self.done = True
            await self._notify()

    async def _train_until_made(self) -> int:
        """Train, and again after what may pass: a death, or a step that did not fit the GPU.

        Of such a step the learner keeps less the next time; if that is not enough, the engine
        sleeps meanwhile, then and in later steps.
        """
        if self._learner.crowded:
            self._learner.crowded = await self._make_room()
        for attempt in range(1, ATTEMPTS):
            try:
                return await self._train()
            except WorkerDied as error:
                logger.warning("training again after: %s", error.message)
            except OutOfMemory as error:
                if attempt > 1:
                    self._learner.crowded = await self._make_room()
                    if not self._learner.crowded:
                        raise
                logger.warning("training again after: %s", error.message)
        return await self._train()

    async def _give_room_back(self) -> None:
        if self._learner.crowded:
            await self._learner.release()

    async def _serve(self, step: int) -> None:
        """Load a step; where the engine finds too little room again, the learner ends first."""
        try:
            await self._load(self.model, step)
        except TrainerError as error:
            if not self._learner.crowded:
                raise
            logger.warning("the learner is started again, for the engine: %s", error.message)
            await self._learner.stop()
            await self._load(self.model, step)

    async def _train(self) -> int:
        """Train once and return the step; one that reached its checkpoint is not trained again."""
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

    async def _compare(self) -> None:
        """Check the engine against the learner, as a rollout: the next step waits for its end."""
        try:
            async with self._gate.sampling():
                found = await self._check(self.model)
        except Exception as error:  # the step stands; only its check is missing
            logger.warning("step %s was not checked: %s", self.model.step, error)
            return
        difference = found["canary/logprob_difference"]
        self._metrics.set("art_canary_logprob_difference", difference, model=self.model.key)
        history.append(self.model.directory, {"step": self.model.step, **found})
        self._reports.add(self.model.project, self.model.name, self.model.step, found)

    def _tell(self, seconds: float) -> None:
        """Log the step, count it, and append its means to the run's history."""
        model = self.model
        logger.info("%s is at step %s after %.1f s", model.key, model.step, seconds)
        means = {
            name: sum(values) / len(values)
            for name in sorted({name for row in self._rows for name in row})
            if (values := [row[name] for row in self._rows if name in row])
        }
        self._metrics.add("art_steps_total", model=model.key)
        self._metrics.add("art_retokenized_total", means.get("data/retokenized", 0))
        self._metrics.set("art_step", model.step, model=model.key)
        self._metrics.set("art_train_seconds", seconds, model=model.key)
        rewards = [
            trajectory["reward"]
            for group in self.request.groups
            for trajectory in group.get("trajectories") or []
            if self.request.config.get("kind") != "sft"  # there rewards mean nothing
        ]
        line = {**means, "time/step_s": seconds, **self._times}
        line["data/step_num_truncated"] = sum(
            choice.get("finish_reason") == "length" for choice in choices_of(self.request.groups)
        )
        if rewards:
            line["train/reward"] = sum(rewards) / len(rewards)
        try:
            history.append(model.directory, {"step": model.step, **line})
        except OSError as error:  # the step is served, and stands
            logger.error("step %s is not in the history: %s", model.step, error)
        self._reports.add(model.project, model.name, model.step, line)
