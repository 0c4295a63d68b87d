"""Settings of the ART backend: its address, the model to train there, and the GRPO step."""

from typing import Any

import pydantic
from pydantic import Field

from kit.config import Config
from trainer.step_config import GrpoConfig


class InitArgs(Config):
    """Settings with which the server loads the model."""

    max_seq_length: int | None = Field(None, ge=16)
    """Longest sequence to train on, in tokens."""


class EngineArgs(Config):
    """Settings with which the server starts vLLM."""

    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    """Fraction of the GPU's memory that vLLM may use."""
    tensor_parallel_size: int | None = Field(None, ge=1)
    """Number of GPUs that vLLM splits the model across."""


class PeftArgs(Config):
    """Settings of the LoRA. Each defaults to the server's own setting."""

    r: int | None = Field(None, ge=1)
    """Rank of the LoRA."""
    lora_alpha: float | None = Field(None, gt=0)
    """Scale of the LoRA: its output is multiplied by `lora_alpha / r`."""
    target_modules: list[str] | None = None
    """Linear layers that get a LoRA, by their Hugging Face names."""


class ArtBackendConfig(Config):
    """Address of the backend, and the model to train there."""

    ip: str
    """Address of the backend."""
    port: int = Field(ge=1, le=65535)
    """Control port of the backend."""
    name: str = "trainer_run"
    """Name of the trained model. If the backend has one of that name, training continues from its
    newest step."""
    project: str = "trainer_project"
    """Project that the model belongs to."""
    base_model: str = "Qwen/Qwen2.5-7B-Instruct"
    """Base model. If the server has loaded one already, it must be the same."""
    api_key: pydantic.SecretStr = pydantic.SecretStr("default")
    """API key, sent as a bearer token."""
    delete_old_checkpoints: bool = False
    """Before every training step, delete all checkpoints except the newest."""
    init_args: InitArgs | None = None
    """Settings with which the server loads the model."""
    engine_args: EngineArgs | None = None
    """Settings with which the server starts vLLM."""
    peft_args: PeftArgs | None = None
    """Settings of the LoRA."""


class TrainingArgs(GrpoConfig):
    """All settings of a GRPO step, plus `beta`, the guide's name for `kl_penalty_coef`."""

    beta: float = Field(0.0, ge=0)
    """Weight of the KL penalty. The same setting as `kl_penalty_coef`: set only one of them."""

    @pydantic.model_validator(mode="after")
    def _check_one_name(self) -> "TrainingArgs":
        if {"beta", "kl_penalty_coef"} <= self.model_fields_set:
            raise ValueError("beta and kl_penalty_coef are the same setting: set only one")
        return self

    def wire(self) -> dict[str, Any]:
        """Return the settings that the user gave, under the server's names."""
        given = self.model_dump(mode="json", exclude_unset=True)
        if "beta" in given:
            given["kl_penalty_coef"] = given.pop("beta")
        return {"learning_rate": self.learning_rate, **given}
