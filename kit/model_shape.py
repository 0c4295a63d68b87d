"""The shape of a base model, read from its `config.json`: how many weights, how much cache.

Only the config is read, never the weights: from a directory, the hub's cache, or the hub itself.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from kit.errors import ConfigError

BUILT_IN: dict[str, dict[str, Any]] = {
    "tiny-random": {
        "vocab_size": 262,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "tie_word_embeddings": True,
    },
    "HuggingFaceTB/SmolLM2-135M-Instruct": {
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
}
"""Models that come with the kit, of which no config need be fetched."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a dense decoder: Llama, Qwen2, Qwen3 or Mistral."""

    vocab_size: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int
    tied_embeddings: bool
    context: int | None = None
    """Tokens of the longest conversation, if the config says it."""

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer: attention and the gated MLP."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim * self.dim
        return attention + 3 * self.dim * self.ffn_dim

    @property
    def parameters(self) -> int:
        embeddings = self.vocab_size * self.dim * (1 if self.tied_embeddings else 2)
        return self.layers * self.layer_parameters + embeddings

    @property
    def lora_inputs_and_outputs(self) -> int:
        """Weights of a LoRA of rank 1 on every linear layer."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        each = 2 * (self.dim + queries) + 2 * (self.dim + keys) + 3 * (self.dim + self.ffn_dim)
        return self.layers * each

    @property
    def cache_bytes_per_token(self) -> int:
        """Keys and values of one token in every layer, in bf16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


def parse_shape(config: Mapping[str, Any], name: str) -> ModelShape:
    """Read the shape from a config in Hugging Face form."""
    try:
        heads = config["num_attention_heads"]
        shape = ModelShape(
            vocab_size=config["vocab_size"],
            dim=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            ffn_dim=config["intermediate_size"],
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            context=config.get("max_position_embeddings"),
        )
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise ConfigError(
            f"The config of `{name}` has no usable {error}",
            hint="Use a dense decoder in Hugging Face form, such as Llama, Qwen or Mistral",
        ) from error
    if not all(isinstance(size, int) and size > 0 for size in vars(shape).values() if size):
        raise ConfigError(
            f"The config of `{name}` has sizes that are not positive numbers",
            hint="Download the model again",
        )
    return shape


def read_shape(name: str, token: str | None = None) -> ModelShape:
    """The shape of the model `name`: a built-in name, a directory or a hub id.

    `token` is for a gated model on the hub; by default it is that of the environment.
    """
    if name in BUILT_IN:
        return parse_shape(BUILT_IN[name], name)
    if Path(name).expanduser().is_dir():
        return parse_shape(_read(Path(name).expanduser() / "config.json"), name)
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ConfigError(
            f"There is no model `{name}`",
            hint="Use a directory with a `config.json`, or a hub id such as `Qwen/Qwen2.5-7B`",
        )
    cached = sorted(_cache().glob(f"models--{name.replace('/', '--')}/snapshots/*/config.json"))
    return parse_shape(_read(cached[-1]) if cached else _from_hub(name, token), name)


def _cache() -> Path:
    """The hub's cache, as `huggingface_hub` finds it."""
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"`{path}` cannot be read: {error}", hint="Use a model directory in Hugging Face form"
        ) from error
    return config if isinstance(config, dict) else {}


def _from_hub(name: str, token: str | None) -> dict[str, Any]:
    hub = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    token = token or os.environ.get("HF_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    url = f"{hub}/{name}/resolve/main/config.json"
    try:
        response = httpx.get(url, headers=headers, follow_redirects=True, timeout=20)
    except httpx.HTTPError as error:
        raise ConfigError(
            f"The config of `{name}` is not on this machine, and the hub cannot be reached: "
            f"{type(error).__name__}",
            hint="Check the network, or name a directory with the model's `config.json`",
        ) from error
    if response.is_error:
        raise ConfigError(
            f"The hub has no config of `{name}`, or the model is gated ({response.status_code})",
            hint="Check the name, and set `HF_TOKEN` for a gated model",
        )
    try:
        config = response.json()
    except ValueError:
        config = None
    return config if isinstance(config, dict) else {}
