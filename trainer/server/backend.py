"""The backend: the models that share one base model, and what clients can do with them."""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator

from kit.types import Json
from trainer.config import ServerConfig
from trainer.engines.choose import engine_kind
from trainer.engines.engine import Delta, SampleRequest
from trainer.errors import BadRequest, TrainerError
from trainer.exact_tokens import new_choice_id
from trainer.server import history
from trainer.server.admission import Admission
from trainer.server.client_settings import check_internal_config, lora_config
from trainer.server.journal import interrupted
from trainer.server.ledger import Entry, Ledger
from trainer.server.models import Model, Models
from trainer.server.reports import Reports
from trainer.server.responses.store import ResponseStore
from trainer.server.rollouts import Rollouts
from trainer.server.step_settings import max_seq_length, step_config
from trainer.server.storage import Storage
from trainer.server.training import Training
from trainer.server.wire import ModelWire, TrainRequest
from trainer.server.workers import Workers, WrapEngine

logger = logging.getLogger(__name__)


class Backend:
    """Everything behind the routes. Created without work; `start` begins it."""

    def __init__(
        self, config: ServerConfig, *, openai_port: int, wrap_engine: WrapEngine | None = None
    ) -> None:
        self.config = config
        self.openai_port = openai_port
        self.last_activity = time.monotonic()
        state = config.state_path
        self.models = Models(state)
        self.ledger = Ledger(state / "ledger.db")
        self.rollouts = Rollouts(state / "rollouts.db")
        self.responses = ResponseStore(state / "responses.db")
        self.threads = ResponseStore(state / "threads.db")
        self.reports = Reports(config)
        self.workers = Workers(config, wrap_engine)
        self.admission = Admission(self.workers, self.ledger, self.reports)
        self.storage = Storage(self.models, self.workers, self.admission)
        self._starting = asyncio.Lock()
        self._registering = asyncio.Lock()
        self._preparing = asyncio.Lock()

    @property
    def busy(self) -> bool:
        """Whether the server samples, trains or starts its workers right now."""
        return self.admission.running or self.workers.gate.in_use or self._starting.locked()

    async def start(self) -> None:
        """Load the base model, and continue the work of a server that was killed.

        The models it served are served again, and every step it left unfinished is completed.
        """
        if not self.config.base_model:
            return
        self.models.starting = True
        try:
            await self._start_workers(self.config.base_model)
            await self._resume()
        finally:
            self.models.starting = False

    async def _resume(self) -> None:
        requests = interrupted(self.models.state, self.config.base_model)
        unfinished = (ModelWire.model_validate(request.model) for request in requests)
        for wire in itertools.chain(self.models.to_restore(), unfinished):
            try:
                await self.prepare(wire)
            except TrainerError as error:  # the other models are still served
                logger.warning("%s is not served again: %s", wire.run, error.message)

    async def stop(self) -> None:
        """Stop everything; a second call does nothing."""
        self.models.clear_restart()
        await self.admission.stop()
        await self.workers.stop()
        await self.reports.wandb.stop()
        self.ledger.close()
        self.rollouts.close()
        self.responses.close()
        self.threads.close()

    # Models

    async def register(self, wire: ModelWire) -> Model | None:
        """Add a model; one that cannot be trained needs nothing from this server."""
        if not wire.trainable:
            return None
        check_internal_config(wire, engine_kind(self.config))
        self.models.check_base(wire.base_model)
        async with self._registering:  # in a thread, because it hashes the checkpoints on disk
            lora = lora_config(wire, self.config.lora)
            model = await asyncio.to_thread(self.models.add, wire, lora)
        model.max_seq_length = max_seq_length(wire)
        return model

    async def prepare(self, wire: ModelWire) -> None:
        """Start the workers if they do not run yet, and serve the model's newest checkpoint."""
        model = await self.register(wire)
        if model is None or wire.base_model is None:
            raise BadRequest(
                f"Model `{wire.name}` cannot be trained: it names no base model",
                hint="Register an `art.TrainableModel` with a `base_model`",
            )
        await self._start_workers(wire.base_model, wire.section("engine_args"))
        async with self._preparing:  # a second client waits here until the model is prepared
            if not model.prepared:
                await self._prepare(model)
        self.models.serve(model, wire)

    async def _prepare(self, model: Model) -> None:
        """Serve a model's newest checkpoint, and finish the step that was interrupted, if any."""
        async with self.workers.gate.training():
            step = await self.workers.learner.prepare(model.checkpoints, model.lora)
            model.add_step(step)
            model.step = step
            await self.workers.load(model, step)
        request = await asyncio.to_thread(model.unfinished)
        # No `await` between this line and the start of the step: a new request could overtake it.
        model.prepared = True
        if request:
            await self.admission.start(model, request).wait()

    async def _start_workers(self, base_model: str, engine_args: Json | None = None) -> None:
        async with self._starting:
            self.models.check_base(base_model)
            await self.workers.start(base_model, engine_args or {})
            self.models.base_model = base_model

    # Sampling

    async def sample(
        self,
        name: str,
        request: SampleRequest,
        *,
        rollout: str | None = None,
        template: Json | None = None,
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        """Yield (policy step, delta), and record every choice that finishes under a new id.

        The name is resolved after the wait for a training step, so the request gets the new
        weights. Unless `request.stream`, all deltas come at the end, so that a death of the
        engine loses none. `template` holds the tools and variables that rendered the prompt.
        """
        async with self.workers.gate.sampling():
            self.last_activity = time.monotonic()
            model, step = self.models.find(name)
            request = model.fit(request, step) if model else request
            choices: dict[int, Delta] = {}
            with model.used(step) if model else contextlib.nullcontext():
                async for delta in self.workers.sample(model, step, request):
                    if delta.index not in choices:
                        choices[delta.index] = Delta(delta.index, choice_id=new_choice_id())
                    choice = choices[delta.index]
                    delta.choice_id = choice.choice_id
                    choice.extend(delta)
                    if choice.finish_reason:
                        entry = Entry(
                            id=choice.choice_id,
                            model=model.key if model else "",
                            step=step,
                            lora_sha256=model.steps.get(step, "") if model else "",
                            rollout=rollout,
                            prompt_ids=request.prompt_ids,
                            completion_ids=choice.token_ids,
                            logprobs=choice.logprobs,
                            constrained=request.constraint is not None,
                            template=template or {},
                        )
                        if choice.token_ids:  # a request may ask for the prompt's logprobs only
                            self.ledger.record(entry, choice.text)
                        self.reports.metrics.count("art_completions_total")
                        tokens = len(choice.token_ids)
                        self.reports.metrics.count("art_sampled_tokens_total", tokens)
                    yield step, delta
            self.last_activity = time.monotonic()

    # Training

    async def train(self, request: TrainRequest) -> Training:
        """Check the request, journal it and start its step."""
        model = self.models.get(request.model)
        self.last_activity = time.monotonic()
        if not model.prepared:
            raise BadRequest(
                f"Model `{model.name}` is not prepared for training",
                hint="Call `model.register(backend)`, which prepares it, and wait for it",
            )
        config = step_config(request, model)
        return await self.admission.admit(model, request, config, self.models.base_model or "")

    async def log(self, wire: ModelWire, groups: list[Json], split: str) -> None:
        """Store trajectories that a client logs under the model's step, and their averages."""
        step = self.models.get(wire).step if wire.trainable else 0
        directory = self.models.directory(wire)
        line = await asyncio.to_thread(history.log, directory, step, groups, split)
        self.reports.wandb.send(wire.project, wire.run, step, line)
