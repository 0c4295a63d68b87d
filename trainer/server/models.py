"""The models under training, and the names that serve them."""

import dataclasses
import json
import logging
import re
import shutil
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from kit.manifest import damage, read_manifest
from kit.state_dir import CHECKPOINTS, RUN, model_path
from trainer import checkpoint
from trainer.config import LoraConfig
from trainer.engines.engine import SampleRequest
from trainer.errors import Conflict, NotReady, TooLong, TrainerError, UnknownModel
from trainer.server.journal import Journal, JournaledRequest
from trainer.server.wire import ModelWire

logger = logging.getLogger(__name__)

# `NAME`, `NAME@7`, and the names that `art.ServerlessBackend` uses.
SERVED = re.compile(
    r"(?:wandb-artifact:///[^/]+/(?P<project>[^/]+)/)?(?P<name>[^/@:]+)(?:(?:@|:step)(?P<step>\d+))?"
)


@dataclass
class Model:
    """A model under training: a LoRA on the shared base, and its newest served step."""

    project: str
    name: str
    """The run's name, under which it is stored."""
    directory: Path
    lora: LoraConfig
    alias: str = ""
    """Another name that serves this run; several runs may share it."""
    step: int = 0
    steps: dict[int, str] = field(default_factory=dict)
    """Complete checkpoints on disk, with the sha256 of each LoRA."""
    prepared: bool = False
    max_seq_length: int | None = None
    """Limit of prompt and completion together, in tokens; None is the base model's limit."""
    leases: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Steps that clients keep and when each lease ends, by its id."""
    sampling: Counter[int] = field(default_factory=Counter)
    """Number of requests in flight, by the step they sample from."""

    @property
    def key(self) -> str:
        # Two projects may use the same name.
        return f"{self.project}/{self.name}"

    @property
    def checkpoints(self) -> Path:
        return self.directory / CHECKPOINTS

    @cached_property
    def journal(self) -> Journal:
        return Journal(self.directory)

    def unfinished(self) -> JournaledRequest | None:
        """The request of a step that a kill left undelivered or a power cut damaged, if any."""
        if request := self.journal.pending():
            return request
        request = self.journal.unsynced()
        if request is None or not self.has_whole(request.step):
            return request
        checkpoint.sync(self.path(request.step))
        self.journal.synced()
        return None

    def path(self, step: int) -> Path:
        return checkpoint.path_of(self.checkpoints, step)

    def lora_name(self, step: int) -> str:
        return f"{self.key}@{step}"

    def fit(self, request: SampleRequest, step: int) -> SampleRequest:
        """The request for the engine: with this step's LoRA, within the model's length limit."""
        limit = request.max_tokens
        if self.max_seq_length is not None:
            room = self.max_seq_length - len(request.prompt_ids)
            needed = 1 if limit is None else limit
            if needed > room:
                raise TooLong(
                    f"{len(request.prompt_ids)} prompt tokens and `max_tokens` {needed} do not "
                    f"fit the model's `max_seq_length` of {self.max_seq_length}",
                    hint="Shorten the messages, or raise `max_seq_length` in `init_args`",
                )
            limit = room if limit is None else limit
        return dataclasses.replace(request, lora=self.lora_name(step), max_tokens=limit)

    @contextmanager
    def used(self, step: int) -> Iterator[None]:
        """Count a request that samples from `step`, which keeps the step loaded."""
        self.sampling[step] += 1
        try:
            yield
        finally:
            self.sampling[step] -= 1

    def read_steps(self) -> None:
        """Read the checkpoints on disk. This hashes every file, so it is too slow per request."""
        self.steps = {}
        for step in checkpoint.list_steps(self.checkpoints):
            self.add_step(step)
        self.step = max(self.steps, default=0)

    def has_whole(self, step: int) -> bool:
        """Whether the checkpoint of `step` is on disk and every file matches its hash."""
        return self.path(step).is_dir() and not damage(self.path(step))

    def discard(self, step: int) -> None:
        """Delete the checkpoint of a step that failed after it was written."""
        if step > self.step:
            self.steps.pop(step, None)
            shutil.rmtree(self.path(step), ignore_errors=True)

    def add_step(self, step: int) -> None:
        """Add a checkpoint that was just written."""
        manifest = read_manifest(self.path(step)) or {"files": {}}
        lora = manifest["files"].get("adapter_model.safetensors", {})
        self.steps[step] = str(lora.get("sha256", ""))


class Models:
    """All models of the server, by (project, name)."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.base_model: str | None = None
        self.starting = False
        """Whether models of a killed server are still being restored."""
        self.newest: Model | None = None
        """The model that was prepared last; the base model's name stands for it."""
        self._models: OrderedDict[tuple[str, str], Model] = OrderedDict()
        self._serving = state / "serving.json"
        self._wires: dict[str, Any] = {}
        """The request that prepared each served model, so that the next server can restore it."""

    def __iter__(self) -> Iterator[Model]:
        return iter(list(self._models.values()))  # a thread may add one meanwhile

    def get(self, wire: ModelWire) -> Model:
        try:
            return self._models[wire.project, wire.run]
        except KeyError:
            raise self._not_found(
                f"Model `{wire.run}` of project `{wire.project}` is not registered",
                "Call `model.register(backend)` first",
            ) from None

    def add(self, wire: ModelWire, lora: LoraConfig) -> Model:
        """Return the model, or create it at the newest step of its checkpoints on disk."""
        key = (wire.project, wire.run)
        if key not in self._models:
            self._migrate(wire, lora)
            model = Model(wire.project, wire.run, self.directory(wire), lora)
            model.read_steps()
            self._models[key] = model
        elif self._models[key].lora != lora:
            raise Conflict(
                f"Model `{wire.run}` is registered with another LoRA",
                hint="Send the `lora_config` or `peft_args` it was registered with, "
                "or choose another name",
            )
        model = self._models[key]
        if wire.run_name is not None:
            model.alias = wire.name
            model.directory.mkdir(parents=True, exist_ok=True)
            names = {"name": wire.name, "run_name": wire.run_name}
            (model.directory / RUN).write_text(json.dumps(names), encoding="utf-8")
        return model

    def _migrate(self, wire: ModelWire, lora: LoraConfig) -> None:
        """Move a run that an older client stored under its `name` to its new `run_name`.

        Only the first run with that name continues it: it is not there any more for the next.
        """
        old = model_path(self.state, wire.project, wire.name)
        steps = checkpoint.list_steps(old / CHECKPOINTS)
        if wire.run == wire.name or self.directory(wire).exists() or (old / RUN).exists():
            return
        if not steps or not _fits(checkpoint.path_of(old / CHECKPOINTS, steps[-1]), wire, lora):
            return
        restored = self.to_restore() if self.starting else []  # they are in use, too
        if (wire.project, wire.name) in {*self._models, *((w.project, w.run) for w in restored)}:
            logger.warning(
                "run `%s` starts anew, because another client uses the run `%s`; to continue that "
                "one, set `run_name` to its name",
                wire.run,
                wire.name,
            )
            return
        old.rename(self.directory(wire))
        logger.warning(
            "run `%s` continues at step %s the run that was stored as `%s`",
            wire.run,
            steps[-1],
            wire.name,
        )

    def check_base(self, base_model: str | None) -> None:
        """Refuse a base model other than the loaded one, which all models share."""
        if self.base_model and base_model and base_model != self.base_model:
            raise Conflict(
                f"This server holds `{self.base_model}`, not `{base_model}`",
                hint="Start another server with `trainer serve --base-model`, on other ports",
            )

    def serve(self, model: Model, wire: ModelWire) -> None:
        """Serve the model under the base model's name too, and remember it for a restart."""
        self.newest = model
        key = (model.project, model.name)
        self._models.move_to_end(key)  # the last one answers to a shared alias
        self._wires.pop(model.key, None)
        self._wires[model.key] = wire.model_dump(mode="json", by_alias=True)
        self._remember()

    def to_restore(self) -> list[ModelWire]:
        """The models that a killed server served, the newest last."""
        try:
            wires = json.loads(self._serving.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return []
        return [ModelWire.model_validate(wire) for wire in wires]

    def clear_restart(self) -> None:
        """Forget what to restore, because the server stops on request."""
        self._serving.unlink(missing_ok=True)

    def remove(self, model: Model) -> None:
        del self._models[model.project, model.name]
        if self._wires.pop(model.key, None):
            self._remember()
        if self.newest is model:
            self.newest = None

    def _remember(self) -> None:
        self._serving.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._serving.with_suffix(".tmp")
        temporary.write_text(json.dumps(list(self._wires.values())), encoding="utf-8")
        temporary.rename(self._serving)

    def directory(self, wire: ModelWire) -> Path:
        """The directory of a model, trainable or not."""
        return model_path(self.state, wire.project, wire.run)

    def served_names(self) -> list[str]:
        """Every name that a completion may use."""
        if self.base_model is None:
            return []
        names = [self.base_model, f"{self.base_model}@base"]
        for model in self:
            for name in dict.fromkeys((model.name, model.alias)) if model.prepared else ():
                if name:
                    names += [name, *(f"{name}@{step}" for step in sorted(model.steps))]
        return list(dict.fromkeys(names))  # several runs may share an alias

    def find(self, name: str) -> tuple[Model | None, int]:
        """Return the model and step of a served name; the untrained base has no model."""
        if self.base_model is not None and name == f"{self.base_model}@base":
            return None, 0
        if self.base_model is not None and name == self.base_model:
            return self.newest, self.newest.step if self.newest else 0
        if match := SERVED.fullmatch(name):
            project, base, step = match["project"], match["name"], match["step"]
            for model in self._named(base):
                if model.prepared and project in (None, model.project):
                    if step is None:
                        return model, model.step
                    if int(step) in model.steps:
                        return model, int(step)
        names = ", ".join(f"`{served}`" for served in self.served_names()) or "nothing yet"
        raise self._not_found(f"There is no model `{name}` here", f"Served now: {names}")

    def _named(self, name: str) -> list[Model]:
        """Models by that name, the newest first; a run's own name goes before an alias."""
        models = list(reversed(self._models.values()))
        aliased = [model for model in models if model.alias == name != model.name]
        return [model for model in models if model.name == name] + aliased

    def _not_found(self, message: str, hint: str) -> TrainerError:
        return NotReady(f"{message} yet") if self.starting else UnknownModel(message, hint=hint)


def _fits(path: Path, wire: ModelWire, lora: LoraConfig) -> bool:
    """Whether the model can continue from the checkpoint in `path`."""
    manifest = read_manifest(path) or {}
    shape = lora.model_dump(mode="json", exclude={"seed"})
    return bool(manifest.get("base_model") == wire.base_model and manifest.get("lora") == shape)
