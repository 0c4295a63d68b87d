"""Admits train requests: journals each one and starts its step."""

import asyncio
import logging
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path

from trainer.errors import Conflict
from trainer.server import captured
from trainer.server.journal import JournaledRequest
from trainer.server.ledger import Ledger
from trainer.server.matching import recall
from trainer.server.model import Model
from trainer.server.reports import Reports
from trainer.server.training import Training
from trainer.server.wire import TrainRequest
from trainer.server.workers import Workers
from trainer.step_config import StepConfig

logger = logging.getLogger(__name__)
MATCHED_STEPS = 32  # older samples are dropped from the ledger: nobody trains on them


MOST_UNDER_WAY = 8  # steps of a model that wait or train; each keeps its request in memory
REMEMBERED = 8  # steps of a model whose answer can be requested again


class Admission:
    """Admits train requests of each model in order, and knows their steps."""

    def __init__(self, workers: Workers, ledger: Ledger, reports: Reports) -> None:
        self._workers = workers
        self._ledger = ledger
        self._reports = reports
        self._trainings: defaultdict[str, dict[int, Training]] = defaultdict(dict)
        """The last steps of each model since this server started, in order."""
        self._written: dict[str, JournaledRequest] = {}
        """The request of each model that is being journaled, before its step begins."""
        self._resumed: dict[str, list[Training]] = {}
        """The steps of each model that a kill interrupted."""
        self._admitting: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def running(self) -> bool:
        return bool(self.under_way)

    @property
    def under_way(self) -> list[str]:
        """The steps that wait or train, as `PROJECT/NAME@STEP`."""
        trainings = [it for known in list(self._trainings.values()) for it in list(known.values())]
        return [it.model.lora_name(it.request.step) for it in trainings if not it.done]

    def steps(self, model: Model) -> list[Training]:
        """The model's last steps since this server started, in order, under way or done."""
        return list(self._trainings.get(model.key, {}).values())

    def used(self) -> set[Path]:
        """The checkpoints that the steps under way of all models read, without links."""
        under_way = [it for known in self._trainings.values() for it in known.values()]
        paths: list[Path] = []
        for training in under_way:
            if not training.done:
                # A step that a killed server has written is read, too.
                step = training.request.step
                paths += [training.model.path(step), training.model.path(step - 1)]
        requests = [it.request for it in under_way if not it.done]
        for request in (*requests, *self._written.values()):
            if reference := request.config.get("kl_ref_adapter_path"):
                paths.append(Path(reference))
        return {path.resolve() for path in paths}

    def find(self, model: Model, step: int) -> Training | None:
        return self._trainings.get(model.key, {}).get(step)

    def resume(self, model: Model, requests: list[JournaledRequest]) -> None:
        """Start the steps that a kill interrupted."""
        self._resumed[model.key] = [self.start(model, request) for request in requests]

    def resumed(self, model: Model) -> list[Training]:
        """The steps of the model that a kill interrupted, as far as they are still under way."""
        return [training for training in self._resumed.get(model.key, []) if not training.done]

    @asynccontextmanager
    async def paused(self, model: Model) -> AsyncIterator[None]:
        """Let requests to train the model wait inside the block; steps under way go on."""
        async with self._admitting[model.key]:
            yield

    async def forget(self, model: Model) -> None:
        """Forget a deleted model: its steps, and everything that it sampled.

        Nothing writes to its directory afterwards, so that it can be deleted.
        """
        self._resumed.pop(model.key, None)
        await _end(self._trainings.pop(model.key, {}).values())
        await self._reports.written()
        await asyncio.to_thread(self._ledger.forget, model.key, before=sys.maxsize)

    async def stop(self) -> None:
        # A request may still come in.
        await _end([it for known in list(self._trainings.values()) for it in known.values()])

    async def admit(
        self,
        model: Model,
        request: TrainRequest,
        config: Callable[[int], StepConfig],
        base_model: str,
        parent_step: int | None = None,
    ) -> Training:
        """Journal the request and start the step, from `parent_step` if that is given.

        `config` returns its settings, given the step that it is trained from. The same body sent
        again before its answer was delivered gets the same step.
        """
        async with self._admitting[model.key]:
            trainings = self.steps(model)
            for training in reversed(trainings):
                step = training.request.step
                if training.answers(request.digest) and parent_step in (None, step - 1):
                    logger.info("%s: a request for step %s again", model.key, step)
                    return training
            if any(training.failed for training in trainings):
                # Steps that were trained from a failed one are removed with it.
                for training in trainings:
                    await training.finished()
            under_way = [training for training in trainings if not training.done]
            if len(under_way) >= MOST_UNDER_WAY:
                raise Conflict(
                    f"Model `{model.name}` has {len(under_way)} steps under way",
                    hint="Wait until one of them ends",
                )
            for training in trainings:
                if training.sync.failed:
                    await training.sync.ended()  # raises while the disk still refuses
            newest = under_way[-1] if under_way else None
            parent = newest.request.step if newest else model.step
            if parent_step not in (None, parent):
                raise Conflict(
                    f"The request is to be trained from step {parent_step} of `{model.name}`, but "
                    f"the newest one is step {parent}",
                    hint="Send it again once that step is under way, or without `parent_step`",
                )
            journaled = JournaledRequest(
                step=parent + 1,
                digest=request.digest,
                base_model=base_model,
                model=request.model.model_dump(mode="json", by_alias=True),
                groups=request.trajectory_groups,
                config=config(parent).model_dump(mode="json"),
            )
            self._written[model.key] = journaled
            try:
                await asyncio.to_thread(self._write, model, journaled)
            finally:
                del self._written[model.key]
            if newest and newest.failed:  # while the request was written
                model.journal.forget(journaled.step)
                raise newest.failed_first(journaled.step)
            return self.start(model, journaled)

    def _write(self, model: Model, request: JournaledRequest) -> None:
        tokenizer = self._workers.tokenizer
        supervised = request.config.get("kind") == "sft"
        choices = captured.to_histories(request.groups, supervised=supervised)
        captured.check(choices, self._ledger, model.key, tokenizer)
        recall(self._ledger, request.groups, tokenizer, model=model.key)
        model.check_newest()
        model.discard(request.step)  # of a step that failed while the disk was read-only
        self._ledger.forget(model.key, before=request.step - MATCHED_STEPS)
        model.journal.begin(request)  # last: whatever is refused must not be in the journal

    def start(self, model: Model, request: JournaledRequest) -> Training:
        """Train a journaled request, after the steps that were started before."""
        known = self._trainings[model.key]
        for step in [step for step in known if step >= request.step]:
            del known[step]  # they failed
        previous = known[max(known)] if known else None
        training = Training(model, request, self._workers, self._reports, previous)
        known[request.step] = training
        for step in [step for step, it in known.items() if it.done][:-REMEMBERED]:
            model.journal.delivered(step)  # nobody has requested its answer again
            del known[step]
        return training


async def _end(trainings: Collection[Training]) -> None:
    """Cancel what is left of all of them first: none must see another one end."""
    for training in trainings:
        training.cancel()
    for training in trainings:
        await training.cancelled()
