"""What a user can set where the model is: the server, the LoRA and the GRPO step."""

from typing import Annotated, Literal

from pydantic import Field, SecretStr

from kit.config import Config
from kit.settings import Env


class LoraConfig(Config):
    """The low-rank weights that are trained."""

    rank: int = Field(8, ge=1, le=512)
    """Rank of every LoRA pair."""
    alpha: float = Field(16.0, gt=0)
    """The LoRA's output is scaled by alpha / rank."""
    targets: tuple[str, ...] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """Linear layers that get a LoRA, by their Hugging Face names."""
    seed: int = 0
    """Seed of the initial LoRA weights."""


class GrpoConfig(Config):
    """One GRPO step."""

    learning_rate: float = Field(5e-5, gt=0)
    """AdamW learning rate of the LoRA weights."""


class ServerConfig(Config):
    """`trainer serve`."""

    base_model: Annotated[str | None, Env("BASE_MODEL")] = None
    """Model to load at start: a built-in name, a directory or a hub id."""
    engine: Literal["auto", "embedded"] = "auto"
    """What samples tokens."""
    host: str = "127.0.0.1"
    """Address both ports bind."""
    port: int = Field(7999, ge=0, le=65535)
    """Port of the control API."""
    openai_port: int = Field(8000, ge=0, le=65535)
    """Port of the OpenAI-compatible API."""
    state_dir: str = ".art"
    """Where models, checkpoints and logs live."""
    api_key: Annotated[SecretStr | None, Env("ART_API_KEY")] = None
    """Bearer token asked of every client when `host` is not loopback."""
    exit_when_idle: Annotated[float, Env("ART_IDLE_MINUTES")] = Field(0, ge=0)
    """Exit after this many minutes without sampling or training; 0 stays."""
    max_hours: Annotated[float, Env("ART_MAX_HOURS")] = Field(0, ge=0)
    """Exit after this many hours whatever happens; 0 stays."""
    lora: LoraConfig = LoraConfig()
    """Shape of the LoRA of a new model."""
