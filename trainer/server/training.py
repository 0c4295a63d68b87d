"""One training step as a transaction: journal, train, checkpoint, load, advance.

`kill -9` of the server or of a worker at any point changes nothing: the journaled request is
trained again from the checkpoint before it, and gives the same one.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from trainer import faults
from trainer.config import GrpoConfig
from trainer.errors import WorkerDied
from trainer.learner.handle import Learner
from trainer.server.gate import Gate
from trainer.server.journal import Request
from trainer.server.models import Model

logger = logging.getLogger(__name__)
Json = dict[str, Any]
ATTEMPTS = 3  # a learner that dies so often on one request would die on it for ever


class Training:
    """A step under way: it goes on whether or not a client listens to its rows."""

    def __init__(
        self,
        model: Model,
        request: Request,
        learner: Learner,
        gate: Gate,
        load: Callable[[Model, int], Awaitable[None]],
    ) -> None:
        self.model = model
        self.request = request
        self._learner = learner
        self._gate = gate
        self._load = load
        self._rows: list[Json] = []
        self._changed = asyncio.Condition()
        self._error: Exception | None = None
        self.done = False
        self._task = asyncio.create_task(self._run())

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
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def wait(self) -> None:
        """Until the step is served; raises what ended it otherwise."""
        async for _ in self.rows():
            pass

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
        try:
            faults.reached("server-journaled")
            async with self._gate.training():
                for attempt in range(1, ATTEMPTS + 1):
                    try:
                        step = await self._train()
                        break
                    except WorkerDied as error:
                        if attempt == ATTEMPTS:
                            raise
                        logger.warning("training again after: %s", error.message)
                faults.reached("server-trained")
                await self._load(self.model, step)  # served, and only then
                self.model.step = step
                faults.reached("server-advanced")
            logger.info("%s is at step %s", self.model.key, self.model.step)
        except Exception as error:
            logger.error("training %s failed: %s", self.model.key, error)
            self.model.journal.delivered()  # a request that cannot be trained is not tried for ever
            self._error = error
        finally:
            self.done = True
            await self._notify()

    async def _train(self) -> int:
        """Train once and return the step; one that reached its checkpoint is not trained again."""
        self.model.read_steps()
        if self.request.step in self.model.steps:
            self._rows = self.model.journal.rows()
            await self._notify()
            return self.request.step
        self.model.journal.restart()
        self._rows = []
        config = GrpoConfig.model_validate(self.request.config)
        made: Json = {}
        async for row in self._learner.train(
            self.model.checkpoints, self.request.groups, config, self.model.lora
        ):
            if "checkpoint" in row:
                made = row
                continue
            self._rows.append(row)
            self.model.journal.row(row)
            faults.reached("server-row")
            await self._notify()
        self._log_history(made)
        step = int(made["step"])
        self.model.add_step(step)
        return step

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _log_history(self, made: Json) -> None:
        rewards = [
            trajectory["reward"]
            for group in self.request.groups
            for trajectory in group.get("trajectories") or []
        ]
        names = {name for row in self._rows for name in row}
        means = {
            name: sum(row[name] for row in self._rows if name in row)
            / sum(name in row for row in self._rows)
            for name in sorted(names)
        }
        line = {"step": made["step"], "recorded_at": time.time(), **means}
        if rewards:
            line["train/reward"] = sum(rewards) / len(rewards)
        with (self.model.directory / "history.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
