"""The backend owns one engine, one learner and the models that share their base model."""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from pathlib import Path

from kit.state_dir import LOGS
from kit.types import Json
from trainer.base_model.resolve import resolve
from trainer.base_model.tokenizer import Tokenizer
from trainer.config import ServerConfig
from trainer.engines.choose import create_engine, engine_kind, with_gpus_assigned
from trainer.engines.engine import Delta, Engine, SampleRequest
from trainer.errors import BadRequest, TrainerError, WorkerDied
from trainer.learner.process import LearnerProcess
from trainer.machines.replicas import with_other_machines
from trainer.server import canary, history
from trainer.server.admission import Trainings
from trainer.server.client_settings import check_internal_config, lora_config, max_seq_length
from trainer.server.gate import Gate
from trainer.server.journal import interrupted
from trainer.server.ledger import Entry, Ledger
from trainer.server.models import Model, Models
from trainer.server.prometheus import Metrics
from trainer.server.rollouts import Rollouts
from trainer.server.training import Training
from trainer.server.wandb_reports import Reports
from trainer.server.wire import ModelWire, TrainRequest

logger = logging.getLogger(__name__)
WrapEngine = Callable[[Engine, Path], Engine]  # of the engine and the base model's directory


class Backend:
    """Everything behind the routes. Created without work; `start` begins it."""

    def __init__(
        self, config: ServerConfig, *, openai_port: int, wrap_engine: WrapEngine | None = None
    ) -> None:
        self.config = config
        self._wrap_engine = wrap_engine
        self.openai_port = openai_port
        self.last_activity = time.monotonic()
        self.tokenizer: Tokenizer | None = None
        state = Path(config.state_dir).expanduser().resolve()
        self.models = Models(state)
        self.ledger = Ledger(state / "ledger.db")
        self.rollouts = Rollouts(state / "rollouts.db")
        self.metrics = Metrics()
        self._logs = state / LOGS
        self._engine: Engine | None = None
        self._learner: LearnerProcess | None = None
        self._gate = Gate()
        self._starting = asyncio.Lock()
        self._registering = asyncio.Lock()
        self._preparing = asyncio.Lock()
        key = config.wandb_api_key
        self.reports = Reports(key.get_secret_value() if key else None, state)
        acts = (self._load, self._check, self._make_room)
        self.trainings = Trainings(self.ledger, self._gate, *acts, self.metrics, self.reports)
        self._unloading: set[asyncio.Task[None]] = set()

    @property
    def busy(self) -> bool:
        """Whether something is sampled, trained or started right now."""
        return self.trainings.running or self._gate.in_use or self._starting.locked()

    async def start(self) -> None:
        """Load the base model, and go on where a killed server left off.

        That is, serve what it served, and make every step that it left half done.
        """
        if not self.config.base_model:
            return
        self.models.starting = True
        try:
            await self._start_workers(self.config.base_model)
            await self._go_on()
        finally:
            self.models.starting = False

    async def _go_on(self) -> None:
        found = interrupted(self.models.state, self.config.base_model)
        steps = (ModelWire.model_validate(request.model) for request in found)
        for wire in itertools.chain(self.models.left_behind(), steps):
            try:
                await self.prepare(wire)
            except TrainerError as error:  # one model's affair: the others are served
                logger.warning("%s is not served again: %s", wire.name, error.message)

    async def stop(self) -> None:
        """End everything; a second call finds nothing left to do."""
        self.models.end()
        await self.trainings.stop()
        for worker in (self._engine, self._learner):
            if worker:
                await worker.stop()
        await self.reports.stop()
        self.ledger.close()
        self.rollouts.close()

    # Models

    async def register(self, wire: ModelWire) -> Model | None:
        """Remember a model; those that cannot be trained need nothing from us."""
        if not wire.trainable:
            return None
        check_internal_config(wire, engine_kind(self.config))
        self.models.check_base(wire.base_model)
        async with self._registering:  # in a thread, since it hashes the checkpoints on disk
            lora = lora_config(wire, self.config.lora)
            model = await asyncio.to_thread(self.models.add, wire, lora)
        model.max_seq_length = max_seq_length(wire)
        return model

    async def prepare(self, wire: ModelWire) -> None:
        """Start engine and learner if need be, and serve the model's newest checkpoint."""
        model = await self.register(wire)
        if model is None or wire.base_model is None:
            raise BadRequest(
                f"Model `{wire.name}` cannot be trained: it names no base model",
                hint="Register an `art.TrainableModel` with a `base_model`",
            )
        await self._start_workers(wire.base_model, wire.section("engine_args"))
        async with self._preparing:  # who comes meanwhile finds the step that was taken up
            if not model.prepared:
                await self._take_up(model)
        self.models.serve(model, wire)

    async def _take_up(self, model: Model) -> None:
        """Serve a model's newest checkpoint, and finish the step that was under way, if any."""
        assert self._learner
        async with self._gate.training():
            step = await self._learner.prepare(model.checkpoints, model.lora)
            model.add_step(step)
            model.step = step
            await self._load(model, step)
        request = await asyncio.to_thread(model.unfinished)
        model.prepared = True  # and no `await` until its step runs, or another could come before it
        if request:
            await self.trainings.start(model, request, self._learner).wait()

    async def adopt(self, model: Model) -> None:
        """Go on from the newest checkpoint on disk, after others have put some there."""
        await asyncio.to_thread(model.read_steps)
        if model.prepared and model.steps:
            async with self._gate.sampling():  # while a step trains, the engine may be asleep
                await self._load(model, model.step)

    async def forget(self, model: Model, steps: Iterable[int]) -> None:
        """Serve `steps` no longer. Requests in flight on them finish first, in the background."""
        for step in steps:
            model.steps.pop(step, None)
            task = asyncio.create_task(self._unload(model, step))
            self._unloading.add(task)
            task.add_done_callback(self._unloading.discard)

    async def _unload(self, model: Model, step: int) -> None:
        while model.sampling[step]:
            await asyncio.sleep(0.1)
        if self._engine and step not in model.steps:
            await self._engine.unload(model.lora_name(step))

    async def _start_workers(self, base_model: str, engine_args: Json | None = None) -> None:
        async with self._starting:
            self.models.check_base(base_model)
            if self._engine and self._learner:
                if engine_args:
                    async with self._gate.training():  # the engine may have to start again
                        await self._engine.configure(engine_args)
                return
            directory = await asyncio.to_thread(resolve, base_model)
            config = with_gpus_assigned(self.config, directory, engine_args or {})
            own = create_engine(config, directory, self._logs)
            engine = with_other_machines(own, config, base_model)
            await engine.configure(engine_args or {})
            if self._wrap_engine:
                engine = self._wrap_engine(engine, directory)
            learner = LearnerProcess(base_model, log=self._logs / "learner.log", config=config)
            try:
                await asyncio.gather(engine.start(), learner.start())
            except TrainerError:
                await asyncio.gather(engine.stop(), learner.stop())
                raise
            self.tokenizer = Tokenizer(directory)
            self._engine, self._learner, self.models.base_model = engine, learner, base_model
            logger.info("serving `%s` with the %s engine", base_model, engine.name)

    async def _load(self, model: Model, step: int) -> None:
        """Have the engine hold a step's LoRA; an engine that dies of something else is retried."""
        assert self._engine
        try:
            await self._engine.load(model.lora_name(step), model.path(step))
        except WorkerDied as error:
            logger.warning("loading again after: %s", error.message)
            await self._engine.load(model.lora_name(step), model.path(step))

    async def _check(self, model: Model) -> dict[str, float]:
        """How far engine and learner differ at a model's newest step, and may differ."""
        assert self._engine and self._learner and self.tokenizer
        bound = canary.BOUNDS[self.config.quantization]
        return await canary.check(self._engine, self._learner, self.tokenizer, model, bound)

    async def _make_room(self) -> bool:
        """Have the engine leave its memory to the learner."""
        return self._engine is not None and await self._engine.make_room()

    # Sampling

    async def sample(
        self, name: str, request: SampleRequest, *, stream: bool, rollout: str | None = None
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        """Yield (policy step, delta), and record every choice that finishes.

        The name is resolved once training is over, not before: who waits gets the new weights.
        Without `stream` the deltas come all at once, so that an engine's death loses none.
        """
        async with self._gate.sampling():
            self.last_activity = time.monotonic()
            model, step = self.models.find(name)
            request = model.fit(request, step) if model else request
            choices: dict[int, Delta] = {}
            with model.used(step) if model else contextlib.nullcontext():
                async for delta in self._sample(model, step, request, stream=stream):
                    choice = choices.setdefault(delta.index, Delta(delta.index))
                    choice.extend(delta)
                    if choice.finish_reason:
                        self._record(model, step, rollout, request, choice)
                    yield step, delta
            self.last_activity = time.monotonic()

    async def _sample(
        self, model: Model | None, step: int, request: SampleRequest, *, stream: bool
    ) -> AsyncIterator[Delta]:
        """Sample, once more if the engine died before anything was given out."""
        assert self._engine  # no name is found before there is one
        for last_try in (False, True):
            given = False
            try:
                if model is not None:
                    await self._load(model, step)
                held: list[Delta] = []
                async for delta in self._engine.sample(request):
                    if stream:
                        given = True
                        yield delta
                    else:
                        held.append(delta)
                for delta in held:
                    yield delta
                return
            except WorkerDied as error:
                if given or last_try:
                    raise
                logger.warning("sampling again after: %s", error.message)

    def _record(
        self,
        model: Model | None,
        step: int,
        rollout: str | None,
        request: SampleRequest,
        choice: Delta,
    ) -> None:
        entry = Entry(
            model=model.key if model else "",
            step=step,
            lora_sha256=model.steps.get(step, "") if model else "",
            rollout=rollout,
            prompt_ids=request.prompt_ids,
            completion_ids=choice.token_ids,
            logprobs=choice.logprobs,
        )
        self.ledger.record(entry, choice.text)
        self.metrics.add("art_completions_total")
        self.metrics.add("art_sampled_tokens_total", len(choice.token_ids))

    # Training

    async def train(self, request: TrainRequest) -> Training:
        """Write the request down and start its step; a step that cannot be trained is refused."""
        model = self.models.get(request.model)
        self.last_activity = time.monotonic()
        return await self.trainings.admit(
            model, request, self.models.base_model or "", self._learner
        )

    async def log(self, wire: ModelWire, groups: list[Json], split: str) -> None:
        """Keep what a run's owner logs under the model's step, and report its averages."""
        step = self.models.get(wire).step if wire.trainable else 0
        directory = self.models.directory(wire)
        line = await asyncio.to_thread(history.log, directory, step, groups, split)
        self.reports.add(wire.project, wire.name, step, line)
