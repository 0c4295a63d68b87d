"""The launcher's settings, read from flags, the environment and `.env`."""

import re
from pathlib import Path
from secrets import token_urlsafe
from typing import Annotated, get_args

from pydantic import Field, SecretStr

from kit.config import Config
from kit.settings import Env, gather, variables

GENERATED_KEY = re.compile(rb"art-key-[\w-]{43}")


def generate_key() -> str:
    """Make a random key. It is stored nowhere here; `GENERATED_KEY` finds it in logs."""
    return f"art-key-{token_urlsafe(32)}"


class Settings(Config):
    """Settings of the launcher, some of which it passes to a task as envs and secrets."""

    cluster: Annotated[str, Env("LAUNCHER_CLUSTER")] = Field(
        "art", pattern=r"^[a-zA-Z]([-_.a-zA-Z0-9]*[a-zA-Z0-9])?$"
    )
    """Name of the cluster that a command works on."""
    base_model: Annotated[str | None, Env("BASE_MODEL")] = None
    """Model to train; by default the task's `BASE_MODEL`."""
    port: Annotated[int, Env("ART_PORT")] = Field(7999, ge=1, le=65535)
    """Port of the control API on the cluster."""
    openai_port: Annotated[int, Env("ART_OPENAI_PORT")] = Field(8000, ge=1, le=65535)
    """Port of the OpenAI API on the cluster."""
    max_hours: Annotated[float | None, Env("ART_MAX_HOURS")] = Field(
        None, ge=0, allow_inf_nan=False
    )
    """Hours after which the server exits; by default the task's `ART_MAX_HOURS`. 0: no limit."""
    idle_minutes: Annotated[float | None, Env("ART_IDLE_MINUTES")] = Field(
        None, ge=0, allow_inf_nan=False
    )
    """Minutes without work after which the server exits; by default the task's
    `ART_IDLE_MINUTES`. 0: no limit."""
    bucket: Annotated[str | None, Env("ART_BUCKET")] = Field(None, pattern=r"^[a-z0-9]+://.+")
    """Bucket that stores the checkpoints, such as `s3://my-bucket`."""
    langfuse_host: Annotated[str | None, Env("LANGFUSE_HOST")] = None
    """Address of Langfuse; by default Langfuse Cloud."""
    hf_token: Annotated[SecretStr | None, Env("HF_TOKEN")] = None
    """Token for gated models on the Hugging Face Hub."""
    wandb_api_key: Annotated[SecretStr | None, Env("WANDB_API_KEY")] = None
    """API key of Weights & Biases."""
    openpipe_api_key: Annotated[SecretStr | None, Env("OPENPIPE_API_KEY")] = None
    """API key of OpenPipe."""
    langfuse_public_key: Annotated[SecretStr | None, Env("LANGFUSE_PUBLIC_KEY")] = None
    """Public key of Langfuse."""
    langfuse_secret_key: Annotated[SecretStr | None, Env("LANGFUSE_SECRET_KEY")] = None
    """Secret key of Langfuse."""
    art_api_key: Annotated[SecretStr | None, Env("ART_API_KEY")] = None
    """Bearer token of the server."""

    def envs(self) -> dict[str, str]:
        """The settings that were given and are not secret, as environment variables of a task."""
        names = variables(Settings)
        values = {
            names[field]: getattr(self, field) for field in names if field in self.model_fields_set
        }
        laptop_only = {"LAUNCHER_CLUSTER", "ART_BUCKET"}
        return {
            name: format(value, "g") if isinstance(value, float) else str(value)
            for name, value in values.items()
            if value is not None and name not in laptop_only and not isinstance(value, SecretStr)
        }

    def secrets(self) -> dict[str, str]:
        """The secrets that were given, by environment variable."""
        values = {name: getattr(self, field) for field, name in variables(Settings).items()}
        return {
            name: value.get_secret_value()
            for name, value in values.items()
            if isinstance(value, SecretStr)
        }


OPTIONAL_SECRETS = frozenset(
    name
    for field, name in variables(Settings).items()
    if SecretStr in get_args(Settings.model_fields[field].annotation)
)
"""Secrets that a task may declare without the user having to set them."""


def read(*, cluster: str | None = None, env_file: Path | None = None) -> Settings:
    """Read the settings from the flag `-c`, the environment and `.env`."""
    return gather(Settings, flags={"cluster": cluster}, env_file=env_file)
