"""The processes that hold the base model: one engine, one learner, and their tokenizer."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from kit.errors import ConfigError
from kit.state_dir import LOGS
from kit.types import Json
from trainer.base_model.resolve import resolve
from trainer.base_model.tokenizer import Tokenizer
from trainer.config import ServerConfig
from trainer.engines.choose import create_engine, has_stream_priority, with_gpus_assigned
from trainer.engines.engine import Delta, Engine, SampleRequest, sample_with_retries
from trainer.engines.gpus import gpus_are_shared, has_cuda
from trainer.engines.vllm_args import EXTENSION
from trainer.errors import Conflict, NotReady, WorkerDied
from trainer.learner.process import LearnerProcess
from trainer.machines.replicas import with_other_machines
from trainer.processes import mps
from trainer.processes.mps import Mps
from trainer.server import canary
from trainer.server.compile_cache import CompileCache
from trainer.server.gate import Gate
from trainer.server.model import Model

logger = logging.getLogger(__name__)
SAMPLE_ATTEMPTS = 2  # a request that kills the engine twice would kill it every time
WrapEngine = Callable[[Engine, Path], Engine]
"""Takes the engine and the base model's directory, and returns the engine to use instead."""


@dataclass(frozen=True)
class _Started:
    engine: Engine
    learner: LearnerProcess | None
    """None if the server only serves a checkpoint."""
    tokenizer: Tokenizer


class Workers:
    """Owns the engine, the learner and the tokenizer. Created without work; `start` begins it."""

    def __init__(self, config: ServerConfig, wrap_engine: WrapEngine | None = None) -> None:
        self.gate = Gate()
        """Closed while the engine cannot sample."""
        self.steps = asyncio.Lock()
        """Held by the step that trains: one at a time, in order of admission. A server that was
        killed holds it until its models are served again, because a step may take long."""
        self.learning = asyncio.Lock()
        """Held by the step that trains, and while a model is prepared."""
        self._config = config
        self._wrap_engine = wrap_engine
        self._started: _Started | None = None
        self._engine_args: Json = {}
        """Settings of clients that the engine has."""
        self._mps: Mps | None = None
        self._compiled: CompileCache | None = None
        self._keeping: asyncio.Task[None] | None = None

    @property
    def engine(self) -> Engine:
        return self._get().engine

    @property
    def learner(self) -> LearnerProcess:
        learner = self._get().learner
        if learner is None:
            raise Conflict("This server trains nothing", hint="Start one without `--from`")
        return learner

    @property
    def takes_turns(self) -> bool:
        """Whether requests wait while a step trains: as configured, or for want of memory."""
        return self._config.take_turns or self.learner.crowded

    @property
    def tokenizer(self) -> Tokenizer:
        return self._get().tokenizer

    def _get(self) -> _Started:
        if self._started is None:
            raise NotReady("The engine and the learner are not started yet")
        return self._started

    async def start(self, base_model: str, engine_args: Json) -> None:
        """Start engine and learner at once; later, only pass `engine_args` on to the engine."""
        if self._started:
            if {**self._engine_args, **engine_args} != self._engine_args:
                before = {**self._config.engine_args, **self._engine_args}.get(EXTENSION)
                if self._mps and engine_args.get(EXTENSION, before) != before:
                    raise Conflict(
                        f"`engine_args.{EXTENSION}` cannot be set any more, because of `--mps`",
                        hint="Set it with `--engine-args` when the server starts",
                    )
                async with self.gate.closed():  # the engine may have to restart
                    await self._started.engine.configure(engine_args)
                    self._engine_args |= engine_args
            return
        directory = await asyncio.to_thread(resolve, base_model)
        tokenizer = await asyncio.to_thread(_read_tokenizer, directory)  # before it costs a start
        trains = self._config.checkpoint is None
        config = with_gpus_assigned(self._config, directory, engine_args, trains=trains)
        logs = config.state_path / LOGS
        shared = has_cuda() and gpus_are_shared(config)
        variables = await self._kept_code(base_model)
        await self._start_mps(shared=shared, log=logs / "mps.log")
        if self._mps:
            variables |= self._mps.environment
            if has_stream_priority(config, engine_args):
                variables |= mps.BY_STREAMS
        reserved = asyncio.Event()
        engine = create_engine(
            config,
            directory,
            logs,
            trains=trains,
            environment=variables,
            reserved=reserved,
        )
        master = ""
        if config.ray:
            engine, master = await with_other_machines(engine, config, base_model)
        await engine.configure(engine_args)
        if self._wrap_engine:
            engine = self._wrap_engine(engine, directory)
        log = logs / "learner.log"
        if self._mps and mps.PRIORITY_VARIABLE not in variables:
            variables = {**variables, **mps.BEHIND}
        learner = (
            LearnerProcess(base_model, log=log, config=config, master=master, environment=variables)
            if trains
            else None
        )
        if not shared:
            reserved.set()
        starting = [asyncio.create_task(engine.start())]
        if learner:
            starting.append(asyncio.create_task(_start_learner(learner, reserved)))
        try:
            await asyncio.gather(*starting)
        except BaseException:  # also if the server stops meanwhile
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            await self._stop(engine, learner)
            raise
        self._started = _Started(engine, learner, tokenizer)
        self._engine_args = dict(engine_args)
        self._keep_code()
        logger.info("serving `%s` with the %s engine", base_model, engine.name)

    async def stop(self) -> None:
        """Stop both; a second call does nothing."""
        if self._started:
            await self._stop(self._started.engine, self._started.learner)

    async def _stop(self, *processes: Engine | LearnerProcess | None) -> None:
        await asyncio.gather(*(process.stop() for process in processes if process))
        if self._mps:
            await self._mps.stop()
            self._mps = None

    async def _kept_code(self, base_model: str) -> dict[str, str]:
        """The variables with which workers find what was compiled before; none without a GPU."""
        if not has_cuda():
            return {}
        self._compiled = CompileCache(self._config, base_model)
        await asyncio.to_thread(self._compiled.restore)
        return self._compiled.environment

    def _keep_code(self) -> None:
        if self._compiled and (self._keeping is None or self._keeping.done()):
            self._keeping = asyncio.create_task(asyncio.to_thread(self._compiled.save))

    async def _start_mps(self, *, shared: bool, log: Path) -> None:
        if not self._config.mps or self._mps:
            return
        if not shared:
            raise ConfigError(
                "`mps` is set, but engine and learner share no GPU here",
                hint="Remove `--mps`: they compute at the same time without it",
            )
        daemon = Mps(log)
        await daemon.start()
        self._mps = daemon

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

    async def check(self, model: Model, step: int, engine_done: asyncio.Event) -> dict[str, float]:
        """Compare engine and learner at a step: their difference and its bound."""
        bound = canary.BOUNDS[self._config.quantization]
        found = await canary.check(
            self.engine, self.learner, self.tokenizer, model, step, bound, self.gate, engine_done
        )
        self._keep_code()  # the first requests and the first step may have compiled more
        return found

    async def make_room(self) -> bool:
        """Ask the engine to leave its memory to the learner; False if it cannot."""
        return await self.engine.make_room()


async def _start_learner(learner: LearnerProcess, reserved: asyncio.Event) -> None:
    """Start the learner, and load the base model beside an engine that has `reserved` its memory.

    vLLM takes its share of what it finds free at its start, so nobody else may take much before.
    """
    await learner.start()
    await learner.warm_up()
    await reserved.wait()
    await learner.load()


def _read_tokenizer(directory: Path) -> Tokenizer:
    """Read the tokenizer, and what takes long to compute about it."""
    tokenizer = Tokenizer(directory)
    logger.debug("a token stands for at most %s bytes", tokenizer.longest_token)
    return tokenizer
