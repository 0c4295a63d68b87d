"""The steps under way: from a train request that came in to a step that is journaled and begun."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable

from trainer.errors import BadRequest, Conflict
from trainer.learner.process import LearnerProcess
from trainer.server.client_settings import step_config
from trainer.server.gate import Gate
from trainer.server.journal import Request
from trainer.server.ledger import Ledger
from trainer.server.models import Model
from trainer.server.prometheus import Metrics
from trainer.server.training import Training
from trainer.server.wandb_reports import Reports
from trainer.server.wire import TrainRequest

logger = logging.getLogger(__name__)
REMEMBERED = 32  # steps whose samples are still matched: nobody trains on older ones


class Trainings:
    """The newest training of every model, under way or done, since this server started."""

    def __init__(
        self,
        ledger: Ledger,
        gate: Gate,
        load: Callable[[Model, int], Awaitable[None]],
        check: Callable[[Model], Awaitable[dict[str, float]]],
        make_room: Callable[[], Awaitable[bool]],
        metrics: Metrics,
        reports: Reports,
    ) -> None:
        self._ledger = ledger
        self._gate = gate
        self._acts = (load, check, make_room)
        self._metrics = metrics
        self._reports = reports
        self._newest: dict[str, Training] = {}
        self._admitting: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def running(self) -> bool:
        return any(not training.done for training in self._newest.values())

    def of(self, model: Model) -> Training | None:
        return self._newest.get(model.key)

    async def stop(self) -> None:
        for training in self._newest.values():
            await training.cancel()

    async def admit(
        self, model: Model, request: TrainRequest, base_model: str, learner: LearnerProcess | None
    ) -> Training:
        """Check the request, write it down and start the step.

        The same body again, while its answer was not delivered, is the same step.
        """
        if learner is None or not model.prepared:
            raise BadRequest(
                f"Model `{model.name}` is not prepared for training",
                hint="Call `model.register(backend)`, which prepares it, and wait for it",
            )
        config = step_config(request, model)
        async with self._admitting[model.key]:
            running = self.of(model)
            if running and running.request.digest == request.digest and model.journal.is_pending:
                logger.info("%s: a request for step %s again", model.key, running.request.step)
                return running
            if running and not running.done:
                raise Conflict(
                    f"Model `{model.name}` is training already", hint="Wait for that step to end"
                )
            if running:
                await running.synced()  # its place in the journal is taken now
            journaled = Request(
                step=model.step + 1,
                digest=request.digest,
                base_model=base_model,
                model=request.model.model_dump(mode="json", by_alias=True),
                groups=request.trajectory_groups,
                config=config.model_dump(mode="json"),
            )
            await asyncio.to_thread(self._write_down, model, journaled)
            return self.start(model, journaled, learner)

    def _write_down(self, model: Model, request: Request) -> None:
        self._ledger.recall(request.groups)
        model.journal.begin(request)
        self._ledger.forget(model.key, before=request.step - REMEMBERED)

    def start(self, model: Model, request: Request, learner: LearnerProcess) -> Training:
        """Train a request that is journaled."""
        training = Training(
            model, request, learner, self._gate, *self._acts, self._metrics, self._reports
        )
        self._newest[model.key] = training
        return training
