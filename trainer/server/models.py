"""The models under training, and the names that serve them."""

import json
import logging
import re
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kit.files import replace_text
from kit.manifest import read_manifest
from kit.state_dir import CHECKPOINTS, RUN, SERVING, model_path
from kit.types import Json
from trainer import checkpoint
from trainer.config import LoraConfig
from trainer.errors import Conflict, NotReady, TrainerError, UnknownModel
from trainer.server.health import Health
from trainer.server.model import Model
from trainer.server.wire import ModelWire

logger = logging.getLogger(__name__)

# `NAME`, `PROJECT/NAME`, each with `@7`, and the names that `art.ServerlessBackend` uses.
SERVED = re.compile(
    r"(?:wandb-artifact:///[^/]+/(?P<artifact>[^/]+)/|(?P<project>[^/:@]+)/)?"
    r"(?P<name>[^/@:]+)(?:(?:@|:step)(?P<step>[0-9]{1,9}))?"
)

SHOWN = 20  # names in an error; a server may serve thousands


class Models:
    """All models of the server, by (project, name)."""

    def __init__(self, state: Path, health: Health | None = None) -> None:
        self.state = state
        self.health = health or Health(state)
        self.base_model: str | None = None
        self.starting = False
        """Whether models of a killed server are still being restored."""
        self.newest: Model | None = None
        """The model that was prepared last; the base model's name stands for it."""
        self._models: OrderedDict[tuple[str, str], Model] = OrderedDict()
        self._serving = state / SERVING
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

    def ready(self, wire: ModelWire) -> Model:
        """Return the model; while the server starts, only once it serves the model again."""
        model = self.get(wire)
        if self.starting and not model.prepared:
            raise NotReady(f"Model `{model.name}` is not served yet")
        return model

    def add(self, wire: ModelWire, lora: LoraConfig) -> Model:
        """Return the model, or create it at the newest step of its checkpoints on disk."""
        key = (wire.project, wire.run)
        if key not in self._models:
            self._migrate(wire, lora)
            directory = self.directory(wire)
            model = Model(wire.project, wire.run, directory, lora, health=self.health)
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
            names = {"name": wire.name, "run_name": wire.run_name}
            replace_text(model.directory / RUN, json.dumps(names))
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
        runs = (
            (sent.get("project"), sent.get("run_name") or sent.get("name")) for sent in restored
        )
        if (wire.project, wire.name) in {*self._models, *runs}:
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
        if self.base_model and base_model is not None and base_model != self.base_model:
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

    def serve_pulled(self, model: Model) -> None:
        """Serve a model that no client registers, under the base model's name too."""
        model.prepared = True
        self._models[model.project, model.name] = self.newest = model

    def to_restore(self) -> list[Json]:
        """The model objects that a killed server served, the newest last."""
        try:
            sent = json.loads(self._serving.read_bytes())
            if not isinstance(sent, list) or not all(isinstance(one, dict) for one in sent):
                raise ValueError("it is not a list of models")
            # All of them, before one is served again: another kill must not forget the others.
            self._wires = {
                f"{one.get('project')}/{one.get('run_name') or one.get('name')}": one
                for one in sent
            }
            return sent
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, RecursionError) as error:
            cause = str(error).splitlines()[0]
            self.health.set_aside(self._serving, cause, "register the models again")
            return []

    def clear_restart(self) -> None:
        """Forget what to restore, because the server stops on request."""
        try:
            self._serving.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("the next server serves these models again: %s", error)

    def remove(self, model: Model) -> None:
        del self._models[model.project, model.name]
        if self._wires.pop(model.key, None):
            self._remember()
        if self.newest is model:
            self.newest = None

    def replaced(self, model: Model) -> bool:
        """Whether another model has taken the place of this one, which was deleted."""
        return self._models.get((model.project, model.name), model) is not model

    def _remember(self) -> None:
        try:
            replace_text(self._serving, json.dumps(list(self._wires.values())))
        except OSError as error:  # they are served all the same
            logger.warning("a restarted server will not serve these models: %s", error)

    def directory(self, wire: ModelWire) -> Path:
        """The directory of a model, trainable or not."""
        return model_path(self.state, wire.project, wire.run)

    def served_names(self) -> list[str]:
        """Every name that a completion may use."""
        if self.base_model is None:
            return []
        names = [self.base_model, f"{self.base_model}@base"]
        prepared = [model for model in self if model.prepared]
        latest = {name: model for model in prepared for name in model.names}
        for model in prepared:
            own = [name for name in model.names if self._own(name, latest[name]) is model]
            # Another run answers to its name: only the project tells them apart.
            for name in own or [model.key]:
                names += [name, *(f"{name}@{step}" for step in model.served_steps)]
        return list(dict.fromkeys(names))

    def find(self, name: str) -> tuple[Model | None, int]:
        """Return the model and step of a served name; the untrained base has no model."""
        if self.base_model is not None and name == f"{self.base_model}@base":
            return None, 0
        if self.base_model is not None and name == self.base_model:
            return self.newest, self.newest.step if self.newest else 0
        if match := SERVED.fullmatch(name):
            model = self._named(match["name"], match["artifact"] or match["project"])
            if model and match["step"] is None:
                return model, model.step
            if model and model.serves(int(match["step"])):
                return model, int(match["step"])
        served = [f"`{one}`" for one in self.served_names()]
        more = [f"and {len(served) - SHOWN} more"] if len(served) > SHOWN else []
        names = ", ".join(served[:SHOWN] + more) or "nothing yet"
        raise self._not_found(f"There is no model `{name}` here", f"Served now: {names}")

    def _named(self, name: str, project: str | None = None) -> Model | None:
        """The model by that name that was prepared last.

        Within its project, a run's own name goes before an alias. A step is only looked for in
        that one model: another run with the same name has other weights under the same number.
        """
        for model in reversed(list(self)):
            if model.prepared and name in model.names and project in (None, model.project):
                return self._own(name, model)
        return None

    def _own(self, name: str, model: Model) -> Model:
        """The run in the project of `model` whose own name it is, or `model`, whose alias it is."""
        own = self._models.get((model.project, name))
        return own if own and own.prepared else model

    def _not_found(self, message: str, hint: str) -> TrainerError:
        return NotReady(f"{message} yet") if self.starting else UnknownModel(message, hint=hint)


def _fits(path: Path, wire: ModelWire, lora: LoraConfig) -> bool:
    """Whether the model can continue from the checkpoint in `path`."""
    manifest = read_manifest(path) or {}
    shape = lora.model_dump(mode="json", exclude={"seed"})
    return bool(manifest.get("base_model") == wire.base_model and manifest.get("lora") == shape)
