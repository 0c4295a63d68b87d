"""The backend: the models that share one base model, and what clients can do with them."""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator

import numpy as np

from kit.errors import KitError
from kit.state_dir import DATABASES
from kit.types import Json
from trainer.config import ServerConfig
from trainer.engines.choose import engine_kind
from trainer.engines.engine import Delta, SampleRequest
from trainer.errors import BadRequest, Conflict
from trainer.exact_tokens import new_choice_id
from trainer.server import exact_prompts, history
from trainer.server.admission import Admission
from trainer.server.client_settings import check_internal_config, lora_config
from trainer.server.health import Health
from trainer.server.journal import interrupted
from trainer.server.ledger import Entry, Ledger, refuse_nan
from trainer.server.model import Model
from trainer.server.models import Models
from trainer.server.pulled import open_checkpoint
from trainer.server.recorder import Recorder
from trainer.server.reports import Reports
from trainer.server.responses.store import ResponseStore
from trainer.server.rollouts import Rollouts
from trainer.server.step_settings import max_seq_length, step_config
from trainer.server.storage import Storage
from trainer.server.training import Training
from trainer.server.wire import ModelWire, TrainRequest
from trainer.server.workers import Workers, WrapEngine
from trainer.step_config import StepConfig

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
        self.health = Health(state)
        self.models = Models(state, self.health)
        ledger, rollouts, responses, threads = (state / name for name in DATABASES)
        self.ledger = Ledger(ledger, health=self.health)
        self.rollouts = Rollouts(rollouts, health=self.health)
        self.responses = ResponseStore(responses, health=self.health)
        self.threads = ResponseStore(threads, health=self.health)
        self.workers = Workers(config, wrap_engine)
        self.recorder = Recorder(config, lambda: self.workers.tokenizer)
        self.reports = Reports(config, self.recorder)
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

        The models it served are served again, then every step it left unfinished is completed.
        """
        self.reports.gpus.start()
        if not self.config.base_model:
            return
        self.models.starting = self.health.starting = True
        try:
            async with self.workers.steps:  # no model waits for the unfinished step of another
                await self._start_workers(self.config.base_model)
                await (self._serve_checkpoint() if self.config.checkpoint else self._resume())
        finally:
            self.models.starting = self.health.starting = False
        await self._finish_resumed()

    async def _serve_checkpoint(self) -> None:
        model = await asyncio.to_thread(open_checkpoint, self.config, self.health)
        await self.workers.load(model, model.step)
        self.models.serve_pulled(model)

    async def _resume(self) -> None:
        requests = interrupted(self.models.state, self.config.base_model, self.health)
        unfinished = (request.model for request in requests)
        for sent in itertools.chain(self.models.to_restore(), unfinished):
            name = f"{sent.get('project')}/{sent.get('run_name') or sent.get('name')}"
            try:
                await self._serve(ModelWire.model_validate(sent))
            except Exception as error:  # the other models are still served
                self._degrade(name, f"`{name}` is not served again", error)

    async def _finish_resumed(self) -> None:
        for training in [it for model in self.models for it in self.admission.resumed(model)]:
            key, step = training.model.key, training.request.step
            try:
                await training.wait()
            except Exception as error:
                self._degrade(key, f"Step {step} of `{key}` was interrupted, and lost", error)

    def _degrade(self, name: str, fault: str, error: Exception) -> None:
        if not isinstance(error, KitError):
            logger.error("%s", name, exc_info=error)
        cause = error.message if isinstance(error, KitError) else repr(error)
        self.health.degrade(name, f"{fault}: {cause}")

    async def stop(self) -> None:
        """Stop everything; a second call does nothing."""
        self.health.stopping = True
        if not self.config.checkpoint:  # then they are those of a server that trains
            self.models.clear_restart()
        await self.admission.stop()
        await self.workers.stop()
        self.reports.gpus.stop()
        await self.reports.wandb.stop()
        await self.recorder.stop()
        for store in (self.ledger, self.rollouts, self.responses, self.threads):
            store.close()

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
        """Start the workers if they do not run yet, and serve the model's newest checkpoint.

        Waits for the steps that a kill interrupted: the client sees the one that it sent.
        """
        model = await self._serve(wire)
        for training in self.admission.resumed(model):
            await training.wait()

    async def _serve(self, wire: ModelWire) -> Model:
        """Serve the model's newest checkpoint, and start the steps that a kill interrupted."""
        model = await self.register(wire)
        if model is None or not wire.base_model:
            raise BadRequest(
                f"Model `{wire.name}` cannot be trained: it names no base model",
                hint="Register an `art.TrainableModel` with a `base_model`",
            )
        await self._start_workers(wire.base_model, wire.section("engine_args"))
        if not model.prepared:
            async with self._preparing:  # a second client waits here until the model is prepared
                if not model.prepared:
                    await self._prepare(model)
        self.models.serve(model, wire)
        return model

    async def _prepare(self, model: Model) -> None:
        requests = await asyncio.to_thread(model.unfinished)
        async with self.workers.learning, contextlib.AsyncExitStack() as turn:
            if self.workers.takes_turns:
                await turn.enter_async_context(self.workers.gate.closed())
            step = await self.workers.learner.prepare(model.checkpoints, model.lora)
            model.add_step(step)
            model.step = step
            await self.workers.load(model, step)
        # No `await` between this line and the start of the steps: no new request overtakes them.
        model.prepared = True
        self.admission.resume(model, requests)

    async def _start_workers(self, base_model: str, engine_args: Json | None = None) -> None:
        async with self._starting:
            self.models.check_base(base_model)
            await self.workers.start(base_model, engine_args or {})
            self.models.base_model = base_model

    # Sampling

    def encode(self, text: str, rollout: str | None = None) -> list[int]:
        """The tokens of a rendered conversation, with those that were sampled in it."""
        return exact_prompts.encode(text, self.workers.tokenizer, self.ledger, rollout)

    async def sample(
        self,
        name: str,
        request: SampleRequest,
        *,
        rollout: str | None = None,
        template: Json | None = None,
        prompt_text: str = "",
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        """Yield (policy step, delta), and record every choice that finishes under a new id.

        A request samples from one step to its end. A name without a step means the newest served
        one when the request begins, after a wait at the gate. Unless `request.stream`, all deltas
        come at the end, so that a death of the engine loses none. `template` holds the tools and
        variables that rendered `prompt_text`.
        """
        async with self.workers.gate.sampling():
            self.last_activity = time.monotonic()
            model, step = self.models.find(name)
            request = model.fit(request, step) if model else request
            choices: dict[int, Delta] = {}
            with model.used(step) if model else contextlib.nullcontext():
                async for delta in self.workers.sample(model, step, request):
                    if delta.prompt_logprobs:  # the first token has none
                        refuse_nan(np.array(delta.prompt_logprobs[1:], dtype=np.float64))
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
                            prompt_text=prompt_text,
                            tokenizer=self.workers.tokenizer.digest if prompt_text else "",
                        )
                        if choice.token_ids:  # a request may ask for the prompt's logprobs only
                            self.ledger.record(entry, choice.text)
                        self.reports.metrics.count("art_completions_total")
                        tokens = len(choice.token_ids)
                        self.reports.metrics.count("art_sampled_tokens_total", tokens)
                    yield step, delta
            self.last_activity = time.monotonic()

    # Training

    async def train(self, request: TrainRequest, parent_step: int | None = None) -> Training:
        """Check the request, journal it and start its step.

        With `parent_step`, it is trained from that step or not at all.
        """
        model = self.models.ready(request.model)
        self.last_activity = time.monotonic()
        if not model.prepared:
            raise BadRequest(
                f"Model `{model.name}` is not prepared for training",
                hint="Call `model.register(backend)`, which prepares it, and wait for it",
            )

        def settings(parent: int) -> StepConfig:
            if self.models.get(request.model) is not model:  # raises if there is none any more
                raise Conflict(
                    f"Model `{model.name}` was deleted while its request waited",
                    hint="Register the model that has its name now, and send the request again",
                )
            config = step_config(request, model, parent)
            _check_something(request.trajectory_groups)
            return config

        base_model = self.models.base_model or ""
        return await self.admission.admit(model, request, settings, base_model, parent_step)

    async def log(self, wire: ModelWire, groups: list[Json], split: str) -> None:
        """Store trajectories that a client logs under the model's step, and their averages."""
        step = self.models.get(wire).step if wire.trainable else 0
        directory = self.models.directory(wire)
        line = await asyncio.to_thread(history.log, directory, step, groups, split)
        self.recorder.logged(directory, step, groups, split)
        self.reports.wandb.send(wire.project, wire.run, step, line)


def _check_something(groups: list[Json]) -> None:
    """Refuse a request without trajectories, and without errors of runs, which are counted."""
    if not any(group.get("trajectories") or group.get("exceptions") for group in groups):
        raise BadRequest(
            "The request holds no trajectories, and a step that trains on nothing would look "
            "like progress",
            hint="Send at least one group, or leave the step out if every run failed",
        )
