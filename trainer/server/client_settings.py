"""Settings of a model and of inference: each one takes effect or is refused by name.

A null counts as absent. A value that asks for the existing behaviour is accepted silently.
"""

import logging
from typing import Any

from kit.types import Json
from trainer.config import LoraConfig, ServerConfig, is_loopback
from trainer.engines import vllm_args
from trainer.errors import BadRequest, Unsupported
from trainer.server.step_settings import an_object, checked, max_seq_length, our_names
from trainer.server.wire import ModelWire, without_nulls
from trainer.step_config import GrpoConfig

logger = logging.getLogger(__name__)

# The names of a LoRA's settings in `peft_args` and in `lora_config`, and ours.
_PEFT = {"r": "rank", "lora_alpha": "alpha", "target_modules": "targets", "random_state": "seed"}
_LORA = {"rank": "rank", "alpha": "alpha", "target_modules": "targets", "random_state": "seed"}
# Sections of the model's internal config, and the keys that take effect on the server.
_ACTING: dict[str, set[str]] = {
    "init_args": {"max_seq_length"},
    "engine_args": {"max_model_len"},
    "trainer_args": {"beta", *GrpoConfig.model_fields},
    "peft_args": set(_PEFT),
    "lora_config": {*_LORA, "max_seq_length"},
    "torchtune_args": set(),
}
# Settings with one supported value: that value changes nothing, any other is refused.
_NEUTRAL: dict[str, Json] = {
    "": {
        "_decouple_vllm_and_unsloth": (True, False),
        "rollout_weights_mode": ("lora",),
        "rollout_weight_update_mode": ("step_lora",),
        "vllm_runtime": ({"mode": "managed"},),
        "allow_unvalidated_arch": (True, False),
    },
    "init_args": {"load_in_4bit": (False,), "load_in_8bit": (False,), "full_finetuning": (False,)},
    "engine_args": {"tensor_parallel_size": (1,), "pipeline_parallel_size": (1,)},
    "trainer_args": {},
    "peft_args": {"lora_dropout": (0,), "bias": ("none",), "use_rslora": (False,)},
    "lora_config": {
        "dropout": (0,),
        "bias": ("none",),
        "use_rslora": (False,),
        "init_weights": (True,),
        "use_gradient_checkpointing": (True, False, "unsloth"),  # memory, never results
    },
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
# TorchTune's names of the architecture. It is read from the base model's files instead.
_DESCRIBING = {"model", "model_type"}
# ART's client sends these with every chat itself, and training uses the tokens of that chat.
_SENT_BY_CLIENT = {"chat_template_kwargs"}


def check_internal_config(model: ModelWire, engine: str) -> None:
    """Refuse every setting that would be ignored, by name."""
    settings = without_nulls(model.internal_config)
    unknown = [
        name
        for name, value in settings.items()
        if name not in {*_ACTING, *_SENT_BY_CLIENT} - {"lora_config"}
        and value
        and value not in _NEUTRAL[""].get(name, ())
    ]
    for section in _ACTING:
        if section == "engine_args" and engine == "vllm":
            vllm_args.check(model.section(section))  # the rest become flags of vLLM
        elif section == "lora_config":
            unknown += _refused(section, without_nulls(model.lora_config))
        else:
            unknown += _refused(section, model.section(section))
    if unknown:
        names = ", ".join(f"`{name}`" for name in unknown)
        raise Unsupported(f"The model's config sets {names}, which this server does not support")
    max_seq_length(model)
    checked(GrpoConfig, our_names(model.section("trainer_args")), "trainer_args")


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
    """The model's LoRA settings, by their old or new name, on top of the server's defaults."""
    peft, lora = model.section("peft_args"), without_nulls(model.lora_config)
    if peft and lora:
        raise BadRequest(
            "Both `peft_args` and `lora_config` are set", hint="Keep only `lora_config`"
        )
    names, source = (_LORA, "lora_config") if lora else (_PEFT, "peft_args")
    requested = {names[key]: value for key, value in (lora or peft).items() if key in names}
    return checked(LoraConfig, {**default.model_dump(), **requested}, source)


def inference_key(config: Json | None, server: ServerConfig, openai_port: int) -> str:
    """The key that the client uses from now on; `config` is ART's `OpenAIServerConfig`."""
    config = without_nulls(config)
    args, engine = (
        without_nulls(an_object(config.pop(name, None), name))
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
