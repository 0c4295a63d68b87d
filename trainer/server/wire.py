"""The shapes that clients send, checked where the bytes enter.

Clients of every ART generation send more keys than we need; those of the model object are
ignored, as upstream does, while settings inside it are honoured or refused by name.
"""

import re
from typing import Any

import pydantic

from kit.config import ConfigT, validate
from kit.errors import ConfigError
from trainer.config import GrpoConfig, LoraConfig
from trainer.errors import BadRequest, Unsupported

# A name becomes a directory: no separators, no leading dot, no surprises.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

Json = dict[str, Any]


class ModelWire(pydantic.BaseModel):
    """ART's model object. Identity is (`project`, `name`)."""

    model_config = pydantic.ConfigDict(extra="ignore", populate_by_name=True)

    name: str
    project: str
    base_model: str | None = None
    trainable: bool = True
    internal_config: Json | None = pydantic.Field(None, alias="_internal_config")

    @pydantic.field_validator("name", "project")
    @classmethod
    def _is_a_plain_name(cls, value: str) -> str:
        if not NAME.fullmatch(value):
            raise ValueError("may hold only letters, digits, `.`, `_` and `-`")
        return value

    def section(self, name: str) -> Json:
        """One part of the internal config, without the nulls that stand for absent."""
        part = (self.internal_config or {}).get(name) or {}
        return {key: value for key, value in part.items() if value is not None}


class PrepareRequest(pydantic.BaseModel):
    model: ModelWire
    config: Json | None = None


class TrainRequest(pydantic.BaseModel):
    model: ModelWire
    trajectory_groups: list[Json]
    config: Json = {}
    dev_config: Json = {}
    verbose: bool = False


# Parts of the internal config, and the keys in each that the thin path understands.
_SECTIONS = {
    "init_args": {"max_seq_length"},
    "engine_args": set[str](),
    "trainer_args": {"learning_rate", "beta"},
    "peft_args": {"r", "lora_alpha", "target_modules"},
}


def check_internal_config(model: ModelWire) -> None:
    """Refuse, by name, every setting that would otherwise be ignored."""
    given = {
        key: value for key, value in (model.internal_config or {}).items() if value is not None
    }
    unknown = [name for name in given if name not in _SECTIONS and given[name]]
    for section, known in _SECTIONS.items():
        unknown += [f"{section}.{key}" for key in model.section(section) if key not in known]
    if unknown:
        names = ", ".join(f"`{name}`" for name in unknown)
        raise Unsupported(f"The model's internal config sets {names}, which this server lacks")


def lora_config(model: ModelWire, default: LoraConfig) -> LoraConfig:
    """The LoRA a model asks for through `peft_args`, else the server's default."""
    names = {"r": "rank", "lora_alpha": "alpha", "target_modules": "targets"}
    asked = {names[key]: value for key, value in model.section("peft_args").items()}
    return _settings(LoraConfig, {**default.model_dump(), **asked}, "peft_args")


def grpo_config(request: TrainRequest) -> GrpoConfig:
    """The settings of one step, from all the places where clients put them.

    NAT always sends its own defaults in `config`, and what its user wrote only in the model's
    `trainer_args`: those win. Generation 1 calls the KL coefficient `beta`.
    """
    asked = {**request.config, **request.dev_config, **request.model.section("trainer_args")}
    if "beta" in asked:
        asked["kl_penalty_coef"] = asked.pop("beta")
    asked = {key: value for key, value in asked.items() if value is not None}
    return _settings(GrpoConfig, asked, "the training config")


def _settings(model: type[ConfigT], values: Json, source: str) -> ConfigT:
    try:
        return validate(model, values, source=source)
    except ConfigError as error:
        raise BadRequest(error.message, hint=error.hint) from error
