"""Admits train requests: journals each one and starts its step."""

import asyncio
import logging
import sys
from collections import defaultdict

from trainer.config import StepConfig
from trainer.errors import Conflict
from trainer.server import captured
from trainer.server.journal import JournaledRequest
from trainer.server.ledger import Ledger
from trainer.server.matching import recall
from trainer.server.models import Model
from trainer.server.reports import Reports
from trainer.server.training import Training
from trainer.server.wire import TrainRequest
from trainer.server.workers import Workers

logger = logging.getLogger(__name__)
MATCHED_STEPS = 32  # older samples are dropped from the ledger: nobody trains on them


class Admission:
    """Starts one step at a time for each model, and knows the newest one of each."""

    def __init__(self, workers: Workers, ledger: Ledger, reports: Reports) -> None:
        self._workers = workers
        self._ledger = ledger
        self._reports = reports
        self._newest: dict[str, Training] = {}
        self._admitting: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def running(self) -> bool:
        return any(not training.done for training in self._newest.values())

    def newest(self, model: Model) -> Training | None:
        """The model's newest step since this server started, under way or done."""
        return self._newest.get(model.key)

    async def forget(self, model: Model) -> None:
        """Forget a deleted model: its newest step, and everything that it sampled."""
        self._newest.pop(model.key, None)
        await asyncio.to_thread(self._ledger.forget, model.key, before=sys.maxsize)

    async def stop(self) -> None:
        for training in self._newest.values():
            await training.cancel()

    async def admit(
        self, model: Model, request: TrainRequest, config: StepConfig, base_model: str
    ) -> Training:
        """Journal the request and start the step.

        The same body sent again before its answer was delivered gets the same step.
        """
        async with self._admitting[model.key]:
            newest = self.newest(model)
            if newest and newest.request.digest == request.digest and model.journal.is_pending:
                logger.info("%s: a request for step %s again", model.key, newest.request.step)
                return newest
            if newest and not newest.done:
                raise Conflict(
                    f"Model `{model.name}` is training already", hint="Wait for that step to end"
                )
            if newest:
                await newest.synced()  # the new request takes its place in the journal
            journaled = JournaledRequest(
                step=model.step + 1,
                digest=request.digest,
                base_model=base_model,
                model=request.model.model_dump(mode="json", by_alias=True),
                groups=request.trajectory_groups,
                config=config.model_dump(mode="json"),
            )
            await asyncio.to_thread(self._write, model, journaled)
            return self.start(model, journaled)

    def _write(self, model: Model, request: JournaledRequest) -> None:
        tokenizer = self._workers.tokenizer
        supervised = request.config.get("kind") == "sft"
        choices = captured.to_histories(request.groups, supervised=supervised)
        captured.check(choices, self._ledger, model.key, tokenizer)
        recall(self._ledger, request.groups, tokenizer)
        model.journal.begin(request)
        self._ledger.forget(model.key, before=request.step - MATCHED_STEPS)

    def start(self, model: Model, request: JournaledRequest) -> Training:
        """Train a journaled request."""
        training = Training(model, request, self._workers, self._reports)
        self._newest[model.key] = training
        return training
