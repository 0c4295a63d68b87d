"""`trainer serve --from`: one checkpoint, served under its own name and never trained.

Nothing is written beside the checkpoint: the ledger and the logs are in the state directory.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic
from fastapi import Request

from kit.errors import ConfigError
from kit.manifest import MANIFEST
from kit.state_dir import CHECKPOINT_GLOB, CHECKPOINTS, names_in_path
from trainer import checkpoint
from trainer.config import LoraConfig, ServerConfig
from trainer.errors import CheckpointError, Conflict, NotFound
from trainer.runs import find_checkpoint
from trainer.server.health import Health
from trainer.server.model import Model

_ALLOWED = {("POST", "/_get_step"), ("POST", "/close")}
_LIST = "/checkpoints"  # how the list of a model's checkpoints ends


@dataclass
class PulledModel(Model):
    """One checkpoint of a run, wherever it is on this machine."""

    place: Path = Path()

    def path(self, step: int) -> Path:
        return self.place


def with_checkpoint(config: ServerConfig, *, base_model: str | None) -> ServerConfig:
    """Return `config` with the base model and the LoRA of the checkpoint that it names.

    `base_model` is where the base model is now, if that is not where it was trained from. A
    `BASE_MODEL` in the environment is a default for training, so it must agree.
    """
    path = _find(config)
    trained_from, lora, _ = _read(path)
    if base_model is None and config.base_model not in (None, trained_from):
        raise ConfigError(
            f"`BASE_MODEL` is `{config.base_model}`, but `{path}` was trained from "
            f"`{trained_from}`",
            hint="Unset it, or say with `--base-model` where that base model is now",
        )
    return config.model_copy(
        update={
            "checkpoint": str(path.resolve()),
            "base_model": base_model or trained_from,
            "lora": lora,
        }
    )


def open_checkpoint(config: ServerConfig, health: Health) -> PulledModel:
    """The model of the checkpoint that `with_checkpoint` has put into `config`."""
    path = _find(config)
    _, lora, step = _read(path)
    project, name = names_in_path(path)
    model = PulledModel(
        project, name, path.parent.parent, lora, step=step, health=health, place=path
    )
    model.add_step(step)
    return model


def refuse_training(checkpoint: str) -> Callable[[Request], Awaitable[None]]:
    """A FastAPI dependency that only lets requests pass that change nothing."""
    path = Path(checkpoint)
    served = f"{names_in_path(path)[1]}@{int(path.name)}" if path.name.isdecimal() else path.name

    async def refuse(request: Request) -> None:
        route = request.method, request.url.path
        if route not in _ALLOWED and not (route[0] == "GET" and route[1].endswith(_LIST)):
            raise Conflict(
                f"This server only serves `{served}`, so {route[0]} `{route[1]}` is refused",
                hint="Start a server without `--from` to register, train or delete models",
            )

    return refuse


def _find(config: ServerConfig) -> Path:
    name = str(config.checkpoint)
    path = find_checkpoint(config.state_path, str(Path(name).expanduser()))
    if not (path / MANIFEST).is_file():
        patterns = (f"{start}*/{MANIFEST}" for start in ("", f"{CHECKPOINTS}/"))
        found = [one for pattern in patterns for one in path.glob(pattern)]
        found += path.glob(f"{CHECKPOINT_GLOB}/{MANIFEST}")
        if found:
            newest = max(found, key=lambda one: one.stat().st_mtime).parent
            raise NotFound(f"`{path}` is not one checkpoint", hint=f"Name one, such as `{newest}`")
    return path


def _read(path: Path) -> tuple[str, LoraConfig, int]:
    """The base model, LoRA and step of an undamaged checkpoint."""
    manifest: dict[str, Any] = checkpoint.verify(path)
    if manifest.get("lora", {}) is None:
        raise CheckpointError(
            f"The checkpoint `{path}` has all weights instead of a LoRA",
            hint="Write it with `trainer export`, and serve the export as a base model",
        )
    try:
        lora = LoraConfig.model_validate(manifest["lora"])
        return str(manifest["base_model"]), lora, int(manifest["step"])
    except (KeyError, ValueError, TypeError, pydantic.ValidationError) as error:
        raise CheckpointError(
            f"The `{MANIFEST}` of `{path}` names no usable base model, LoRA and step",
            hint="Pull the checkpoint again",
        ) from error
