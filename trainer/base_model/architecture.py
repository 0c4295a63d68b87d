"""The architecture of a base model, read from its Hugging Face `config.json`. No torch here.

Every supported family is the same decoder with a few switches, so one assembly covers them all. An
unsupported family or switch raises an error that names it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.base_model.json_files import AGAIN, Numbers, read_object
from trainer.errors import ModelError

# model_type in config.json -> whether q, k and v have a bias, and whether q and k are normed.
FAMILIES = {
    "llama": (False, False),
    "mistral": (False, False),
    "qwen2": (True, False),
    "qwen3": (False, True),
}
SUPPORTED = "Llama (2, 3, 3.1, 3.2, SmolLM2), Qwen2, Qwen2.5, Qwen3 (dense) and Mistral"


@dataclass(frozen=True)
class Rope:
    """Rotary position embeddings: plain, scaled linearly, or scaled as in Llama 3.1."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192


@dataclass(frozen=True)
class Architecture:
    """Everything needed to assemble the model."""

    family: str
    vocab_size: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int
    norm_eps: float
    rope: Rope
    max_length: int
    """Longest sequence: the position limit or the sliding window, whichever is smaller."""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool


def read_architecture(directory: Path) -> Architecture:
    """Read the architecture of the model in `directory`. Raises ModelError if it is unsupported."""
    path = directory / "config.json"
    config = read_object(path, hint="Use a model directory in Hugging Face form")
    try:
        return parse_architecture(config)
    except KeyError as exc:
        raise ModelError(
            f"`{path}` lacks {exc}", hint="Use a model directory in Hugging Face form"
        ) from exc
    except ValueError as exc:
        raise ModelError(f"`{path}` {exc}", hint=AGAIN) from exc
    except ModelError as exc:
        message = exc.message[0].lower() + exc.message[1:]
        raise ModelError(f"`{path}`: {message}", hint=exc.hint) from exc


def parse_architecture(config: dict[str, Any]) -> Architecture:
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        names = config.get("architectures")
        name = names[0] if isinstance(names, list) and names else family
        raise ModelError(
            f"The architecture `{name!s:.60}` is not supported", hint=f"Supported: {SUPPORTED}"
        )
    _refuse(config)
    qkv_bias, qk_norm = FAMILIES[family]
    attention_bias = bool(config.get("attention_bias", False))
    numbers = Numbers(config)
    dim, heads = numbers.whole("hidden_size"), numbers.whole("num_attention_heads")
    kv_heads = numbers.whole("num_key_value_heads", heads)
    head_dim = numbers.whole("head_dim", max(dim // heads, 1))
    if heads % kv_heads or head_dim % 2:
        raise ValueError(
            f"has {heads} heads of size {head_dim} and {kv_heads} key heads, which do not fit"
        )
    positions = numbers.whole("max_position_embeddings", 4096, most=1 << 30)
    # Mistral 7B v0.1 has a sliding window; inside one window attention is plain causal attention.
    windowed = family == "mistral"
    window = numbers.whole("sliding_window", positions, most=1 << 30) if windowed else positions
    return Architecture(
        family=family,
        vocab_size=numbers.whole("vocab_size"),
        dim=dim,
        layers=numbers.whole("num_hidden_layers", most=10_000),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_dim=numbers.whole("intermediate_size"),
        norm_eps=numbers.real("rms_norm_eps", 1e-6),
        rope=_rope(config),
        max_length=min(positions, window),
        qkv_bias=qkv_bias or attention_bias,
        output_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=qk_norm,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


def _refuse(config: Mapping[str, Any]) -> None:
    """Raise for settings that would silently change the result if they were ignored."""
    unsupported = None
    if (activation := config.get("hidden_act", "silu")) != "silu":
        unsupported = f"hidden_act={activation}"
    elif config.get("use_sliding_window"):
        unsupported = "use_sliding_window=true"
    elif config.get("quantization_config"):
        unsupported = "quantization_config"
    elif config.get("pretraining_tp", 1) != 1:
        unsupported = f"pretraining_tp={config['pretraining_tp']}"
    if unsupported:
        raise ModelError(
            f"The model's `{unsupported}` is not supported", hint=f"Supported: {SUPPORTED}"
        )


def _rope(config: dict[str, Any]) -> Rope:
    # transformers 5 writes `rope_parameters`; earlier versions write `rope_theta`, `rope_scaling`.
    scaling: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        given = config.get(name) or {}
        if not isinstance(given, dict):
            raise ValueError(f"has `{name}` `{given!s:.60}`, which is no object")
        scaling |= given
    theta = Numbers(config).real("rope_theta", 10_000.0)
    numbers = Numbers(scaling, "rope_parameters.")
    theta = numbers.real("rope_theta", theta)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, kind, factor=numbers.real("factor"))
    if kind == "llama3":
        return Rope(
            theta,
            kind,
            factor=numbers.real("factor"),
            low_freq_factor=numbers.real("low_freq_factor"),
            high_freq_factor=numbers.real("high_freq_factor"),
            original_length=numbers.whole("original_max_position_embeddings", most=1 << 30),
        )
    raise ModelError(
        f"RoPE scaling `{kind!s:.60}` is not supported",
        hint="Supported: `linear`, `llama3` and no scaling",
    )
