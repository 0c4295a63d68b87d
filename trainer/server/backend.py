"""The backend owns one engine, one learner and the models that share their base model.

A step: train → checkpoint renamed into place → loaded by the engine → the step advances.
"""

import asyncio
import dataclasses
import json
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.manifest import read_manifest
from trainer import checkpoint
from trainer.base_models import resolve
from trainer.config import GrpoConfig, LoraConfig, ServerConfig
from trainer.engines.embedded import EmbeddedEngine
from trainer.engines.engine import Delta, Engine, SampleRequest
from trainer.errors import BadRequest, Conflict, NotFound, TrainerError
from trainer.learner.handle import Learner
from trainer.server.gate import Gate
from trainer.server.ledger import Entry, Ledger, choices_of
from trainer.server.wire import (
    ModelWire,
    TrainRequest,
    check_internal_config,
    grpo_config,
    lora_config,
)
from trainer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
Json = dict[str, Any]


@dataclass
class Model:
    """A model under training: a LoRA on the shared base, and its newest served step."""

    project: str
    name: str
    directory: Path
    lora: LoraConfig
    step: int = 0
    steps: set[int] = dataclasses.field(default_factory=set)
    """Steps whose checkpoints are on disk; reading them all costs a hash of every file."""
    prepared: bool = False

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    def lora_name(self, step: int) -> str:
        return f"{self.key}@{step}"

    @property
    def key(self) -> str:
        # Project included: two projects may both hold a model of that name.
        return f"{self.project}/{self.name}"

    def lora_sha256(self, step: int) -> str:
        manifest = read_manifest(checkpoint.path_of(self.checkpoints, step)) or {"files": {}}
        return str(manifest["files"].get("adapter_model.safetensors", {}).get("sha256", ""))


class Backend:
    """Everything behind the routes. Created without work; `start` begins it."""

    def __init__(self, config: ServerConfig, *, openai_port: int) -> None:
        self.config = config
        self.openai_port = openai_port
        self.base_model: str | None = None
        self.last_activity = time.monotonic()
        self.training = False
        self._state = Path(config.state_dir).expanduser().resolve()
        self._models: dict[tuple[str, str], Model] = {}
        self._newest: Model | None = None
        self.tokenizer: Tokenizer | None = None
        self.ledger = Ledger(self._state / "ledger.db")
        self._engine: Engine | None = None
        self._learner: Learner | None = None
        self._gate = Gate()
        self._starting = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        if self.config.base_model:
            await self._start_workers(self.config.base_model)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        for worker in (self._engine, self._learner):
            if worker:
                await worker.stop()
        self.ledger.close()

    # Models

    def register(self, wire: ModelWire) -> Model | None:
        """Remember a model; one with checkpoints on disk resumes at its newest step."""
        if not wire.trainable:
            return None
        check_internal_config(wire)
        self._check_base(wire.base_model)
        key = (wire.project, wire.name)
        if key not in self._models:
            directory = self._state / wire.project / "models" / wire.name
            lora = lora_config(wire, self.config.lora)
            model = Model(wire.project, wire.name, directory, lora)
            model.steps = set(checkpoint.list_steps(model.checkpoints))
            model.step = max(model.steps, default=0)
            self._models[key] = model
        return self._models[key]

    async def prepare(self, wire: ModelWire) -> None:
        """Start engine and learner if need be, and serve the model's newest checkpoint."""
        model = self.register(wire)
        if model is None or wire.base_model is None:
            raise BadRequest(
                f"Model `{wire.name}` cannot be trained: it names no base model",
                hint="Register an `art.TrainableModel` with a `base_model`",
            )
        await self._start_workers(wire.base_model)
        assert self._learner and self._engine
        if not model.prepared:
            async with self._gate.training():
                model.step = await self._learner.prepare(model.checkpoints, model.lora)
                await self._serve(model, model.step)
            model.prepared = True
        self._newest = model

    def model(self, wire: ModelWire) -> Model:
        try:
            return self._models[wire.project, wire.name]
        except KeyError:
            raise NotFound(
                f"Model `{wire.name}` of project `{wire.project}` is not registered",
                hint="Call `model.register(backend)` first",
            ) from None

    def _check_base(self, base_model: str | None) -> None:
        if self.base_model and base_model and base_model != self.base_model:
            raise Conflict(
                f"This server holds `{self.base_model}`, not `{base_model}`",
                hint="Start another server with `trainer serve --base-model`, on other ports",
            )

    async def _start_workers(self, base_model: str) -> None:
        async with self._starting:
            self._check_base(base_model)
            if self._engine and self._learner:
                return
            logs = self._state / "logs"
            directory = await asyncio.to_thread(resolve, base_model)
            self.tokenizer = Tokenizer(directory)
            engine = EmbeddedEngine(directory, log=logs / "engine.log")
            learner = Learner(base_model, log=logs / "learner.log")
            try:
                await asyncio.gather(engine.start(), learner.start())
            except TrainerError:
                await asyncio.gather(engine.stop(), learner.stop())
                raise
            self._engine, self._learner, self.base_model = engine, learner, base_model
            logger.info("serving `%s` with the %s engine", base_model, engine.name)

    # Sampling

    def served_names(self) -> list[str]:
        """Every name a completion may ask for."""
        names = [self.base_model, f"{self.base_model}@base"] if self.base_model else []
        for model in self._models.values():
            if model.prepared:
                steps = sorted(model.steps)
                names += [model.name, *(f"{model.name}@{step}" for step in steps)]
        return [name for name in names if name]

    def find(self, name: str) -> tuple[Model | None, int]:
        """The model and step behind a served name; no model means the untrained base."""
        base, _, wanted = name.rpartition("@") if "@" in name else (name, "", "")
        if base == self.base_model and wanted == "base":
            return None, 0
        if name == self.base_model:  # follows the model that was prepared last
            return self._newest, self._newest.step if self._newest else 0
        for model in reversed(self._models.values()):
            if model.prepared and model.name == base:
                if not wanted:
                    return model, model.step
                if wanted.isdigit() and int(wanted) in model.steps:
                    return model, int(wanted)
        names = ", ".join(f"`{served}`" for served in self.served_names()) or "nothing yet"
        raise NotFound(f"There is no model `{name}` here", hint=f"Served now: {names}")

    async def sample(
        self, name: str, request: SampleRequest, *, rollout: str | None = None
    ) -> AsyncIterator[tuple[int, Delta]]:
        """Yield (policy step, delta), and record every choice that finishes.

        The name is resolved once training is over, not before: who waits gets the new weights.
        """
        self.find(name)
        async with self._gate.sampling():
            self.last_activity = time.monotonic()
            model, step = self.find(name)
            assert self._engine  # `find` knows no name before there is one
            if model is not None:
                await self._load(model, step)
                request = dataclasses.replace(request, lora=model.lora_name(step))
            choices: dict[int, Delta] = {}
            async for delta in self._engine.sample(request):
                choice = choices.setdefault(delta.index, Delta(delta.index))
                choice.extend(delta)
                if choice.finish_reason:
                    self._record(model, step, rollout, request, choice)
                yield step, delta
            self.last_activity = time.monotonic()

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
            lora_sha256=model.lora_sha256(step) if model else "",
            rollout=rollout,
            prompt_ids=request.prompt_ids,
            completion_ids=choice.token_ids,
            logprobs=choice.logprobs,
        )
        self.ledger.record(entry, choice.text)

    # Training

    def start_training(self, request: TrainRequest) -> AsyncIterator[Json]:
        """Check the request, start the step, and return its rows of metrics.

        The step runs in a task of its own: a client that goes away does not undo it.
        """
        model = self.model(request.model)
        if not model.prepared:
            raise BadRequest(
                f"Model `{model.name}` is not prepared for training",
                hint="Call `model.register(backend)`, which prepares it, and wait for it",
            )
        config = grpo_config(request)
        for choice in choices_of(request.trajectory_groups):
            if entry := self.ledger.find(choice):
                choice["art"] = {
                    "prompt_ids": entry.prompt_ids,
                    "completion_ids": entry.completion_ids,
                    "logprobs": entry.logprobs,
                }
        rows: asyncio.Queue[Json | Exception | None] = asyncio.Queue()
        task = asyncio.create_task(self._train(model, request.trajectory_groups, config, rows))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return _drain(rows)

    async def _train(
        self,
        model: Model,
        groups: list[Json],
        config: GrpoConfig,
        rows: "asyncio.Queue[Json | Exception | None]",
    ) -> None:
        assert self._learner
        try:
            async with self._gate.training():
                self.training = True
                last: Json = {}
                train = self._learner.train(model.checkpoints, groups, config, model.lora)
                async for row in train:
                    if "checkpoint" in row:
                        last = row
                    else:
                        rows.put_nowait(row)
                        self._log_metrics(model, row)
                await self._serve(model, int(last["step"]))
            logger.info("%s/%s is at step %s", model.project, model.name, model.step)
        except Exception as error:
            logger.error("training %s/%s failed: %s", model.project, model.name, error)
            rows.put_nowait(error)
        finally:
            self.training = False
            self.last_activity = time.monotonic()
            rows.put_nowait(None)

    async def _serve(self, model: Model, step: int) -> None:
        """Load `step` into the engine; only then does the model's step advance."""
        await self._load(model, step)
        model.steps.add(step)
        model.step = step

    async def _load(self, model: Model, step: int) -> None:
        assert self._engine
        path = checkpoint.path_of(model.checkpoints, step)
        await self._engine.load(model.lora_name(step), path)

    def _log_metrics(self, model: Model, row: Json) -> None:
        with (model.directory / "history.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": model.step + 1, "time": time.time(), **row}) + "\n")


async def _drain(rows: "asyncio.Queue[Json | Exception | None]") -> AsyncIterator[Json]:
    while (row := await rows.get()) is not None:
        if isinstance(row, Exception):
            raise row
        yield row
