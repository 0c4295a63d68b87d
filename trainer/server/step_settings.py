"""Settings of one training step: each one takes effect or is refused by name.

A null counts as absent. A value that asks for the existing behaviour is accepted silently.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kit.config import ConfigT, validate
from kit.errors import ConfigError
from kit.manifest import read_manifest
from kit.state_dir import CHECKPOINTS, MODELS, STEP_NAME
from kit.types import Json
from trainer.errors import BadRequest, NotFound, Unsupported
from trainer.server.model import Model
from trainer.server.wire import ModelWire, TrainRequest, without_nulls
from trainer.step_config import GrpoConfig, SftConfig, StepConfig

logger = logging.getLogger(__name__)

# Tinker's settings of the optimizer and the loss, which openpipe-art's `train` accepts.
_ADAM: dict[str, Callable[[float], Json]] = {
    "learning_rate": lambda value: {"learning_rate": value},
    "beta1": lambda value: {"adam_beta1": value},
    "beta2": lambda value: {"adam_beta2": value},
    "eps": lambda value: {"adam_epsilon": value},
    "weight_decay": lambda value: {"weight_decay": value},
    "grad_clip_norm": lambda value: {"max_grad_norm": value or 1e9},  # 0 disables clipping
}
_LOSS: dict[str, Callable[[float], Json]] = {
    "clip_low_threshold": lambda value: {"epsilon": 1 - value},
    "clip_high_threshold": lambda value: {"epsilon_high": value - 1},
}
# Every checkpoint has the state of the optimizer, so any interval of these is met.
_ALWAYS_SAVED = ("optimizer_save_interval", "final_training_step")


def max_seq_length(model: ModelWire) -> int | None:
    """The requested limit of prompt and completion in tokens, by any of its names."""
    limits = [
        model.section("init_args").get("max_seq_length"),
        model.section("engine_args").get("max_model_len"),
        (model.lora_config or {}).get("max_seq_length"),
    ]
    requested = [limit for limit in limits if limit is not None]
    for limit in requested:
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 16:
            raise BadRequest(
                f"`max_seq_length` is `{limit}`", hint="Use a whole number of tokens, at least 16"
            )
    return min(requested, default=None)


def step_config(request: TrainRequest, model: Model, parent: int) -> StepConfig:
    """The settings of one step of either kind, which is trained from the step `parent`."""
    if request.config.get("kind") != "sft":
        return grpo_config(request, model, parent)
    requested = {"max_seq_length": max_seq_length(request.model), **request.config}
    return checked(SftConfig, without_nulls(requested), "the training config")


def grpo_config(request: TrainRequest, model: Model, parent: int) -> GrpoConfig:
    """Merge the settings of one step from the three places where clients put them.

    NAT always sends its own defaults in `config` and the user's settings only in the model's
    `trainer_args`, so these override `config`. `dev_config` overrides both, for this step only.
    """
    requested: Json = {"max_seq_length": max_seq_length(request.model)}
    for source in (request.config, request.model.section("trainer_args"), request.dev_config):
        requested |= our_names(without_nulls(source))
    if (path := requested.get("kl_ref_adapter_path")) is not None:
        requested["kl_ref_adapter_path"] = _own_checkpoint(path, model)
    requested |= _kl_reference(requested, model, parent)
    return checked(GrpoConfig, without_nulls(requested), "the training config")


def _kl_reference(requested: Json, model: Model, parent: int) -> Json:
    """Take the names of the KL penalty's reference out of `requested`, and return its path."""
    names = ("kl_penalty_reference_step", "kl_penalty_step_lag")
    found = without_nulls({name: requested.pop(name, None) for name in names})
    if not found:
        return {}
    given = [*found, *({"kl_ref_adapter_path"} & without_nulls(requested).keys())]
    if len(given) > 1:
        raise BadRequest(f"Both `{given[0]}` and `{given[1]}` are set", hint="Remove one of them")
    (name, value), *_ = found.items()
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise BadRequest(f"`{name}` is `{value}`", hint="Use a whole number of steps")
    if not requested.get("kl_penalty_coef"):
        raise BadRequest(f"`{name}` needs `kl_penalty_coef`", hint="Set it, or remove the other")
    step = max(0, parent - value) if name == "kl_penalty_step_lag" else value
    if step == 0 and step not in model.steps:
        return {}  # a run starts at its base model, which is the reference without a path
    return {"kl_ref_adapter_path": str(_reference(model, name, step, parent))}


def our_names(values: Json) -> Json:
    """Translate clients' settings to our names; generation 1 calls the KL coefficient `beta`."""
    renamed = dict(values)
    if "beta" in renamed:
        renamed["kl_penalty_coef"] = renamed.pop("beta")
    if (loss := renamed.pop("loss_fn", None)) is not None:
        if loss not in ("cispo", "ppo"):
            raise Unsupported(f"`loss_fn` is `{loss}`", hint="Use `cispo` or `ppo`")
        _agree(renamed, "loss_fn", "ppo", loss == "ppo")
    if (normalize := renamed.pop("normalize_advantages", None)) is not None:
        _agree(renamed, "normalize_advantages", "scale_rewards", normalize)
    for name in _ALWAYS_SAVED:
        count = renamed.pop(name, 1)
        if not isinstance(count, int) or count < 1:
            raise BadRequest(f"`{name}` is `{count}`", hint="Use a whole number of steps")
    if not renamed.pop("save_checkpoint", True):
        logger.warning("`save_checkpoint=False`: this server saves a checkpoint of every step")
    for name, ours in (("adam_params", _ADAM), ("loss_fn_config", _LOSS)):
        for key, value in without_nulls(an_object(renamed.pop(name, None), name)).items():
            if key not in ours:
                raise Unsupported(f"`{name}.{key}` is not supported")
            if not isinstance(value, int | float):
                raise BadRequest(f"`{name}.{key}` is `{value}`", hint="Use a number")
            renamed |= ours[key](value)
    return renamed


def _agree(settings: Json, name: str, ours: str, value: Any) -> None:
    """Set `ours`, which the client calls `name`; newer clients send both."""
    if settings.get(ours, value) != value:
        raise BadRequest(f"`{name}` and `{ours}` disagree", hint=f"Remove `{ours}`")
    settings[ours] = value


def an_object(value: Any, name: str) -> Json:
    """Return an object or an empty one for null; refuse anything else by name."""
    if not isinstance(value, dict | None):
        raise BadRequest(f"`{name}` is `{value}`", hint="Use an object")
    return value or {}


def _reference(model: Model, name: str, step: int, parent: int) -> Path:
    """The checkpoint of the step that the KL penalty compares with; it may be under way."""
    if step not in model.steps and not model.step < step <= parent:
        raise NotFound(
            f"`{name}` refers to step `{step}`, and `{model.name}` has no such checkpoint",
            hint=f"Available steps: {', '.join(map(str, sorted(model.steps))) or 'none'}",
        )
    return model.path(step)


def _own_checkpoint(value: Any, model: Model) -> str:
    """The checkpoint that a client names by its path; it may be one of any run of this server.

    A client could otherwise make the learner read every file of this machine.
    """
    state = model.directory.resolve().parents[2]
    try:
        path = Path(value).resolve()
        inside = path.relative_to(state)
        _, models, _, checkpoints, step = inside.parts
        named = (models, checkpoints) == (MODELS, CHECKPOINTS) and STEP_NAME.fullmatch(step)
        manifest = read_manifest(path) if named else None
    except (TypeError, ValueError, OSError):
        manifest = None
    if manifest is None:
        raise BadRequest(
            f"`kl_ref_adapter_path` is `{str(value)[:200]}`, which is not a checkpoint of this "
            "server",
            hint="Use `kl_penalty_reference_step`, or the directory of a checkpoint that is kept "
            "here",
        )
    ours = read_manifest(model.path(model.step)) or manifest
    shape = model.lora.model_dump(mode="json", exclude={"seed"})
    if (manifest.get("base_model"), manifest.get("lora")) != (ours.get("base_model"), shape):
        # It would be computed with this run's base model and `alpha`, so it would be another one.
        raise BadRequest(
            f"`kl_ref_adapter_path` is `{path}`, which has another base model or LoRA than "
            f"`{model.name}`",
            hint="Use a checkpoint of a run with the same base model and `peft_args`",
        )
    return str(path)


def checked(model: type[ConfigT], values: Json, source: str) -> ConfigT:
    """Validate settings from `source`, a name for messages."""
    try:
        return validate(model, values, source=source)
    except ConfigError as error:
        raise BadRequest(error.message, hint=error.hint) from error
