"""Settings that clients put into requests: each one acts, or is refused by its name.

Nulls are absent. Values that ask for what is the case anyway are taken in silence.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kit.config import ConfigT, validate
from kit.errors import ConfigError
from kit.types import Json
from trainer.config import (
    GrpoConfig,
    LoraConfig,
    ServerConfig,
    SftConfig,
    StepConfig,
    is_loopback,
)
from trainer.engines import vllm_args
from trainer.errors import BadRequest, NotFound, Unsupported
from trainer.server.models import Model
from trainer.server.wire import ModelWire, TrainRequest, without_nulls

logger = logging.getLogger(__name__)

# PEFT's names of what shapes a LoRA, and ours.
_PEFT = {"r": "rank", "lora_alpha": "alpha", "target_modules": "targets", "random_state": "seed"}
# Sections of the model's internal config, and the keys that act on the server.
_ACTING: dict[str, set[str]] = {
    "init_args": {"max_seq_length"},
    "engine_args": {"max_model_len"},
    "trainer_args": {"beta", *GrpoConfig.model_fields},
    "peft_args": set(_PEFT),
    "torchtune_args": set(),
}
# What is so here anyway: asking for it changes nothing, asking for anything else is refused.
_NEUTRAL: dict[str, Json] = {
    "": {"_decouple_vllm_and_unsloth": (True, False), "rollout_weights_mode": ("lora",)},
    "init_args": {"load_in_4bit": (False,), "load_in_8bit": (False,), "full_finetuning": (False,)},
    "engine_args": {"tensor_parallel_size": (1,), "pipeline_parallel_size": (1,)},
    "trainer_args": {},
    "peft_args": {"lora_dropout": (0,), "bias": ("none",), "use_rslora": (False,)},
    "torchtune_args": {
        "tensor_parallel_dim": (1,),
        "context_parallel_dim": (1,),
        "enable_activation_offloading": (False,),
        "async_weight_syncing": (False,),
    },
}
# They change how vLLM spends memory and time, never which tokens come out: on a laptop NVIDIA's
# guide must run as it is written.
_VLLM_ONLY = {"gpu_memory_utilization", "enforce_eager", "enable_prefix_caching", "max_num_seqs"}
# Tinker's settings of the optimizer and of the loss, by which openpipe-art's `train` takes them.
_ADAM: dict[str, Callable[[float], Json]] = {
    "learning_rate": lambda value: {"learning_rate": value},
    "beta1": lambda value: {"adam_beta1": value},
    "beta2": lambda value: {"adam_beta2": value},
    "eps": lambda value: {"adam_epsilon": value},
    "weight_decay": lambda value: {"weight_decay": value},
    "grad_clip_norm": lambda value: {"max_grad_norm": value or 1e9},  # 0 clips nothing
}
_LOSS: dict[str, Callable[[float], Json]] = {
    "clip_low_threshold": lambda value: {"epsilon": 1 - value},
    "clip_high_threshold": lambda value: {"epsilon_high": value - 1},
}
# TorchTune's name of the architecture, which is read from the base model's own files.
_DESCRIBING = {"model", "model_type"}


def check_internal_config(model: ModelWire, engine: str) -> None:
    """Refuse, by name, every setting that would otherwise be ignored."""
    given = without_nulls(model.internal_config)
    unknown = [
        name
        for name, value in given.items()
        if name not in _ACTING and value and value not in _NEUTRAL[""].get(name, ())
    ]
    for section in _ACTING:
        if section == "engine_args" and engine == "vllm":
            vllm_args.check(model.section(section))  # the others reach vLLM as its flags
        else:
            unknown += _refused(section, model.section(section))
    if unknown:
        names = ", ".join(f"`{name}`" for name in unknown)
        raise Unsupported(f"The model's internal config sets {names}, which this server lacks")
    max_seq_length(model)
    _settings(GrpoConfig, _grpo(model.section("trainer_args")), "trainer_args")


def _refused(section: str, part: Json) -> list[str]:
    refused = []
    for key, value in part.items():
        if key in _ACTING[section] or value in _NEUTRAL[section].get(key, ()):
            continue
        if section == "engine_args" and key in _VLLM_ONLY:
            logger.warning("engine_args.%s = %s acts on vLLM only", key, value)
        elif section == "torchtune_args" and key in _DESCRIBING:
            logger.warning("torchtune_args.%s is read from the base model itself", key)
        else:
            refused.append(f"{section}.{key}")
    return refused


def lora_config(model: ModelWire, default: LoraConfig) -> LoraConfig:
    """The LoRA a model asks for through `peft_args`, else the server's default."""
    asked = {_PEFT[key]: value for key, value in model.section("peft_args").items() if key in _PEFT}
    return _settings(LoraConfig, {**default.model_dump(), **asked}, "peft_args")


def max_seq_length(model: ModelWire) -> int | None:
    """The longest prompt and completion that a model asks for, by either of its names."""
    limits = [
        model.section("init_args").get("max_seq_length"),
        model.section("engine_args").get("max_model_len"),
    ]
    given = [limit for limit in limits if limit is not None]
    for limit in given:
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 16:
            raise BadRequest(
                f"`max_seq_length` is `{limit}`", hint="Give a whole number of tokens, from 16"
            )
    return min(given, default=None)


def step_config(request: TrainRequest, model: Model) -> StepConfig:
    if request.config.get("kind") != "sft":
        return grpo_config(request, model)
    asked = {"max_seq_length": max_seq_length(request.model), **request.config}
    return _settings(SftConfig, without_nulls(asked), "the training config")


def grpo_config(request: TrainRequest, model: Model) -> GrpoConfig:
    """The settings of one step, from all the places where clients put them.

    NAT always sends its own defaults in `config`, and what its user wrote only in the model's
    `trainer_args`: those win over `config`. What was asked for this one step is in `dev_config`.
    """
    asked: Json = {"max_seq_length": max_seq_length(request.model)}
    for source in (request.config, request.model.section("trainer_args"), request.dev_config):
        asked |= _grpo(without_nulls(source))
    if (step := asked.pop("kl_penalty_reference_step", None)) is not None:
        if asked.get("kl_ref_adapter_path"):
            raise BadRequest(
                "Both `kl_penalty_reference_step` and `kl_ref_adapter_path` are given",
                hint="Leave one of them out",
            )
        asked["kl_ref_adapter_path"] = str(_reference(model, step))
    return _settings(GrpoConfig, without_nulls(asked), "the training config")


def _grpo(values: Json) -> Json:
    """Clients' settings by our names: generation 1 calls the KL coefficient `beta`."""
    renamed = dict(values)
    if "beta" in renamed:
        renamed["kl_penalty_coef"] = renamed.pop("beta")
    for name, ours in (("adam_params", _ADAM), ("loss_fn_config", _LOSS)):
        for key, value in without_nulls(_object(renamed.pop(name, None), name)).items():
            if key not in ours:
                raise Unsupported(f"`{name}.{key}` is not supported")
            if not isinstance(value, int | float):
                raise BadRequest(f"`{name}.{key}` is `{value}`", hint="Give a number")
            renamed |= ours[key](value)
    return renamed


def _object(value: Any, name: str) -> Json:
    if not isinstance(value, dict | None):
        raise BadRequest(f"`{name}` is `{value}`", hint="Give an object")
    return value or {}


def _reference(model: Model, step: Any) -> Path:
    """The checkpoint of a step, which the policy is held to."""
    if not isinstance(step, int) or step not in model.steps:
        raise NotFound(
            f"`kl_penalty_reference_step` is `{step}`, and `{model.name}` has no such checkpoint",
            hint=f"Kept are {', '.join(map(str, sorted(model.steps))) or 'none'}",
        )
    return model.path(step)


def inference_key(config: Json | None, server: ServerConfig, openai_port: int) -> str:
    """The key that the client is told to use; `config` is ART's `OpenAIServerConfig`."""
    config = without_nulls(config)
    args, engine = (
        without_nulls(_object(config.pop(name, None), name))
        for name in ("server_args", "engine_args")
    )
    unknown = [f"engine_args.{key}" for key in engine]
    unknown += list(config)
    key = args.pop("api_key", None)
    if args.pop("port", openai_port) != openai_port:
        raise Unsupported(
            f"`server_args.port` differs from `{openai_port}`, where this server listens",
            hint="Start it with `trainer serve --openai-port`",
        )
    if not _same_host(args.pop("host", server.host), server.host):
        raise Unsupported(
            f"`server_args.host` differs from `{server.host}`, where this server listens",
            hint="Start it with `trainer serve --host`",
        )
    neutral = {
        "return_tokens_as_token_ids": True,
        "enable_auto_tool_choice": True,
        "tool_call_parser": "hermes",
    }
    unknown += [f"server_args.{name}" for name in args if args[name] != neutral.get(name)]
    if unknown:
        names = ", ".join(f"`{name}`" for name in unknown)
        raise Unsupported(
            f"The inference server is configured at its start, not by {names}",
            hint="Put `engine_args` into the model's internal config; remove the others",
        )
    required = server.api_key.get_secret_value() if server.requires_key and server.api_key else None
    if required and key not in (None, required):
        raise BadRequest(
            "`server_args.api_key` is not this server's key", hint="It is set by `ART_API_KEY`"
        )
    return str(key or required or "default")


def _same_host(asked: Any, bound: str) -> bool:
    return asked == bound or (is_loopback(str(asked)) and is_loopback(bound))


def _settings(model: type[ConfigT], values: Json, source: str) -> ConfigT:
    try:
        return validate(model, values, source=source)
    except ConfigError as error:
        raise BadRequest(error.message, hint=error.hint) from error
