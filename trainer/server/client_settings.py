"""Settings that clients send in requests: each one takes effect or is refused by name.

A null counts as absent. A value that asks for the existing behaviour is accepted silently.
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

# PEFT's names of the settings of a LoRA, and ours.
_PEFT = {"r": "rank", "lora_alpha": "alpha", "target_modules": "targets", "random_state": "seed"}
# Sections of the model's internal config, and the keys that take effect on the server.
_ACTING: dict[str, set[str]] = {
    "init_args": {"max_seq_length"},
    "engine_args": {"max_model_len"},
    "trainer_args": {"beta", *GrpoConfig.model_fields},
    "peft_args": set(_PEFT),
    "torchtune_args": set(),
}
# Settings with one supported value: that value changes nothing, any other is refused.
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
# These change vLLM's use of memory and time, never its tokens. Without vLLM they are accepted, so
# that NVIDIA's guide runs on a laptop as it is written.
_VLLM_ONLY = {"gpu_memory_utilization", "enforce_eager", "enable_prefix_caching", "max_num_seqs"}
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
# TorchTune's names of the architecture. It is read from the base model's files instead.
_DESCRIBING = {"model", "model_type"}


def check_internal_config(model: ModelWire, engine: str) -> None:
    """Refuse every setting that would be ignored, by name."""
    settings = without_nulls(model.internal_config)
    unknown = [
        name
        for name, value in settings.items()
        if name not in _ACTING and value and value not in _NEUTRAL[""].get(name, ())
    ]
    for section in _ACTING:
        if section == "engine_args" and engine == "vllm":
            vllm_args.check(model.section(section))  # the rest become flags of vLLM
        else:
            unknown += _refused(section, model.section(section))
    if unknown:
        names = ", ".join(f"`{name}`" for name in unknown)
        raise Unsupported(
            f"The model's internal config sets {names}, which this server does not support"
        )
    max_seq_length(model)
    _settings(GrpoConfig, _grpo(model.section("trainer_args")), "trainer_args")


def _refused(section: str, part: Json) -> list[str]:
    refused = []
    for key, value in part.items():
        if key in _ACTING[section] or value in _NEUTRAL[section].get(key, ()):
            continue
        if section == "engine_args" and key in _VLLM_ONLY:
            logger.warning("engine_args.%s = %s only affects vLLM", key, value)
        elif section == "torchtune_args" and key in _DESCRIBING:
            logger.warning("torchtune_args.%s is read from the base model itself", key)
        else:
            refused.append(f"{section}.{key}")
    return refused


def lora_config(model: ModelWire, default: LoraConfig) -> LoraConfig:
    """The LoRA settings in a model's `peft_args`, on top of the server's defaults."""
    peft = model.section("peft_args")
    requested = {_PEFT[key]: value for key, value in peft.items() if key in _PEFT}
    return _settings(LoraConfig, {**default.model_dump(), **requested}, "peft_args")


def max_seq_length(model: ModelWire) -> int | None:
    """The requested limit of prompt and completion in tokens, by either of its two names."""
    limits = [
        model.section("init_args").get("max_seq_length"),
        model.section("engine_args").get("max_model_len"),
    ]
    requested = [limit for limit in limits if limit is not None]
    for limit in requested:
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 16:
            raise BadRequest(
                f"`max_seq_length` is `{limit}`", hint="Use a whole number of tokens, at least 16"
            )
    return min(requested, default=None)


def step_config(request: TrainRequest, model: Model) -> StepConfig:
    """The settings of one step, of either kind."""
    if request.config.get("kind") != "sft":
        return grpo_config(request, model)
    requested = {"max_seq_length": max_seq_length(request.model), **request.config}
    return _settings(SftConfig, without_nulls(requested), "the training config")


def grpo_config(request: TrainRequest, model: Model) -> GrpoConfig:
    """Merge the settings of one step from the three places where clients put them.

    NAT always sends its own defaults in `config` and the user's settings only in the model's
    `trainer_args`, so these override `config`. `dev_config` overrides both, for this step only.
    """
    requested: Json = {"max_seq_length": max_seq_length(request.model)}
    for source in (request.config, request.model.section("trainer_args"), request.dev_config):
        requested |= _grpo(without_nulls(source))
    if (step := requested.pop("kl_penalty_reference_step", None)) is not None:
        if requested.get("kl_ref_adapter_path"):
            raise BadRequest(
                "Both `kl_penalty_reference_step` and `kl_ref_adapter_path` are set",
                hint="Remove one of them",
            )
        requested["kl_ref_adapter_path"] = str(_reference(model, step))
    return _settings(GrpoConfig, without_nulls(requested), "the training config")


def _grpo(values: Json) -> Json:
    """Translate clients' settings to our names; generation 1 calls the KL coefficient `beta`."""
    renamed = dict(values)
    if "beta" in renamed:
        renamed["kl_penalty_coef"] = renamed.pop("beta")
    for name, ours in (("adam_params", _ADAM), ("loss_fn_config", _LOSS)):
        for key, value in without_nulls(_object(renamed.pop(name, None), name)).items():
            if key not in ours:
                raise Unsupported(f"`{name}.{key}` is not supported")
            if not isinstance(value, int | float):
                raise BadRequest(f"`{name}.{key}` is `{value}`", hint="Use a number")
            renamed |= ours[key](value)
    return renamed


def _object(value: Any, name: str) -> Json:
    if not isinstance(value, dict | None):
        raise BadRequest(f"`{name}` is `{value}`", hint="Use an object")
    return value or {}


def _reference(model: Model, step: Any) -> Path:
    """The checkpoint of the step that the KL penalty compares with."""
    if not isinstance(step, int) or step not in model.steps:
        raise NotFound(
            f"`kl_penalty_reference_step` is `{step}`, and `{model.name}` has no such checkpoint",
            hint=f"Available steps: {', '.join(map(str, sorted(model.steps))) or 'none'}",
        )
    return model.path(step)


def inference_key(config: Json | None, server: ServerConfig, openai_port: int) -> str:
    """The key that the client uses from now on; `config` is ART's `OpenAIServerConfig`."""
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
            f"The inference server is configured when it starts, not by {names}",
            hint="Move `engine_args` to the model's internal config; remove the others",
        )
    required = server.api_key.get_secret_value() if server.requires_key and server.api_key else None
    if required and key not in (None, required):
        raise BadRequest(
            "`server_args.api_key` is not this server's key",
            hint="The key is in `ART_API_KEY` of the server",
        )
    return str(key or required or "default")


def _same_host(requested: Any, bound: str) -> bool:
    return requested == bound or (is_loopback(str(requested)) and is_loopback(bound))


def _settings(model: type[ConfigT], values: Json, source: str) -> ConfigT:
    try:
        return validate(model, values, source=source)
    except ConfigError as error:
        raise BadRequest(error.message, hint=error.hint) from error
