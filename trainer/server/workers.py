"""The processes that hold the base model: one engine, one learner, and their tokenizer."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from kit.state_dir import LOGS
from kit.types import Json
from trainer.base_model.resolve import resolve
from trainer.base_model.tokenizer import Tokenizer
from trainer.config import ServerConfig
from trainer.engines.choose import create_engine, with_gpus_assigned
from trainer.engines.engine import Delta, Engine, SampleRequest, sample_with_retries
from trainer.errors import NotReady, TrainerError, WorkerDied
from trainer.learner.process import LearnerProcess
from trainer.machines.replicas import with_other_machines
from trainer.server import canary
from trainer.server.gate import Gate
from trainer.server.models import Model

logger = logging.getLogger(__name__)
SAMPLE_ATTEMPTS = 2  # a request that kills the engine twice would kill it every time
WrapEngine = Callable[[Engine, Path], Engine]
"""Takes the engine and the base model's directory, and returns the engine to use instead."""


@dataclass(frozen=True)
class _Started:
    engine: Engine
    learner: LearnerProcess
    tokenizer: Tokenizer


class Workers:
    """Owns the engine, the learner and the tokenizer. Created without work; `start` begins it."""

    def __init__(self, config: ServerConfig, wrap_engine: WrapEngine | None = None) -> None:
        self.gate = Gate()
        """Sampling and training take turns."""
        self._config = config
        self._wrap_engine = wrap_engine
        self._started: _Started | None = None

    @property
    def engine(self) -> Engine:
        return self._get().engine

    @property
    def learner(self) -> LearnerProcess:
        return self._get().learner

    @property
    def tokenizer(self) -> Tokenizer:
        return self._get().tokenizer

    def _get(self) -> _Started:
        if self._started is None:
            raise NotReady("The engine and the learner are not started yet")
        return self._started

    async def start(self, base_model: str, engine_args: Json) -> None:
        """Start engine and learner; once they run, only pass `engine_args` on to the engine."""
        if self._started:
            if engine_args:
                async with self.gate.training():  # the engine may have to restart
                    await self._started.engine.configure(engine_args)
            return
        directory = await asyncio.to_thread(resolve, base_model)
        config = with_gpus_assigned(self._config, directory, engine_args)
        logs = config.state_path / LOGS
        own_engine = create_engine(config, directory, logs)
        engine = with_other_machines(own_engine, config, base_model)
        await engine.configure(engine_args)
        if self._wrap_engine:
            engine = self._wrap_engine(engine, directory)
        learner = LearnerProcess(base_model, log=logs / "learner.log", config=config)
        try:
            await asyncio.gather(engine.start(), learner.start())
        except TrainerError:
            await asyncio.gather(engine.stop(), learner.stop())
            raise
        self._started = _Started(engine, learner, Tokenizer(directory))
        logger.info("serving `%s` with the %s engine", base_model, engine.name)

    async def stop(self) -> None:
        """Stop both; a second call does nothing."""
        if self._started:
            await self._started.engine.stop()
            await self._started.learner.stop()

    async def load(self, model: Model, step: int) -> None:
        """Load a step's LoRA into the engine, and retry once if the engine dies."""
        try:
            await self.engine.load(model.lora_name(step), model.path(step))
        except WorkerDied as error:
            logger.warning("loading again after: %s", error.message)
            await self.engine.load(model.lora_name(step), model.path(step))

    async def unload(self, model: Model, step: int) -> None:
        """Remove a step's LoRA from the engine; before the start there is none to remove."""
        if self._started:
            await self._started.engine.unload(model.lora_name(step))

    def sample(
        self, model: Model | None, step: int, request: SampleRequest
    ) -> AsyncIterator[Delta]:
        """Sample from a step's LoRA, or without a model from the base model."""

        @asynccontextmanager
        async def attempt() -> AsyncIterator[AsyncIterator[Delta]]:
            if model is not None:
                await self.load(model, step)
            deltas = self.engine.sample(request)
            async with aclosing(deltas):  # type: ignore[type-var]
                yield deltas

        return sample_with_retries(attempt, attempts=SAMPLE_ATTEMPTS, stream=request.stream)

    async def check(self, model: Model) -> dict[str, float]:
        """Compare engine and learner at a model's newest step: their difference and its bound."""
        bound = canary.BOUNDS[self._config.quantization]
        return await canary.check(self.engine, self.learner, self.tokenizer, model, bound)

    async def make_room(self) -> bool:
        """Ask the engine to leave its memory to the learner; False if it cannot."""
        return await self.engine.make_room()
