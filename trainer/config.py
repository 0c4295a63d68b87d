"""Settings of the trainer: the server and the LoRA."""

import ipaddress
import json
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import pydantic
from pydantic import Field, SecretStr

from kit.config import Config
from kit.settings import Env
from kit.state_dir import STATE_DIR

Names = Annotated[
    tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]+$")], ...],
    pydantic.BeforeValidator(lambda value: _split(value)),
]
DEVICES = r"^\d+(,\d+)*$"
Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LoraConfig(Config):
    """The low-rank weights that training changes."""

    rank: int = Field(8, ge=1, le=512)
    """Rank of every LoRA pair."""
    alpha: float = Field(16.0, gt=0, le=1e6)
    """The LoRA's output is scaled by alpha / rank."""
    targets: tuple[Target, ...] = Field(get_args(Target), min_length=1)
    """Linear layers with a LoRA, by their Hugging Face names."""
    seed: int = Field(0, ge=-(2**63), lt=2**64)
    """Seed of the initial LoRA weights."""


class ServerConfig(Config):
    """Settings of `trainer serve`."""

    base_model: Annotated[str | None, Env("BASE_MODEL")] = None
    """Model to load at start: a built-in name, a directory or a hub id."""
    checkpoint: Annotated[str | None, Env("ART_CHECKPOINT")] = None
    """Checkpoint to serve without training: its directory, or NAME or NAME@STEP of a model in the
    state directory. The checkpoint names its base model."""
    engine: Literal["auto", "vllm", "embedded"] = "auto"
    """Engine that samples tokens; `auto` means vLLM if a CUDA GPU and vLLM are found."""
    engine_args: Annotated[
        dict[str, Any], Env("ART_ENGINE_ARGS"), pydantic.BeforeValidator(lambda it: _json(it))
    ] = Field(default_factory=dict)
    """Settings of `vllm serve` by their Python names, such as `gpu_memory_utilization`; in the
    variable, a JSON object."""
    quantization: Literal["fp8"] | None = None
    """Keep frozen weights in fp8, in both engine and learner: faster, but less exact."""
    vllm: Annotated[str | None, Env("ART_VLLM")] = None
    """Python of another environment that has vLLM; None means this server's environment."""
    host: str = "127.0.0.1"
    """Address that both ports bind to."""
    port: int = Field(7999, ge=0, le=65535)
    """Port of the control API."""
    openai_port: int = Field(8000, ge=0, le=65535)
    """Port of the OpenAI-compatible API."""
    state_dir: str = STATE_DIR
    """Directory for models, checkpoints and logs."""
    engine_devices: str | None = Field(None, pattern=DEVICES)
    """GPUs for the engine, such as `0,1`; None means a share of those that the learner does not
    use."""
    learner_devices: str | None = Field(None, pattern=DEVICES)
    """GPUs for the learner, one process each; None means those that the engine does not use."""
    nodes: int = Field(1, ge=1)
    """Machines of the Ray cluster that train a step together, including this one; the others only
    sample."""
    engine_nodes: int = Field(1, ge=1)
    """Machines of the Ray cluster that hold one copy of the model together, including this one, for
    a model that is larger than a machine. It needs vLLM. With 1 each machine holds a whole copy."""
    ray: str | None = Field(None, pattern=r"^(auto|[^/]+:\d+)$")
    """Ray cluster whose machines sample and train too: HOST:PORT of its head, or `auto` for the one
    that was started on this machine. It needs `api_key`."""
    learner_port: int = Field(7997, ge=1, le=65535)
    """Port on this machine's address in the Ray cluster where the learner's processes meet."""
    api_key: Annotated[SecretStr | None, Env("ART_API_KEY")] = None
    """Bearer token that every client must send if `host` is not loopback."""
    require_key: bool = False
    """Require the key on loopback too."""
    allowed_hosts: Annotated[Names, Env("ART_ALLOWED_HOSTS")] = ()
    """Other names by which clients without a key may reach this server; in the variable, separated
    by commas."""
    cors: bool = False
    """Allow browser pages on loopback (`http://localhost:3000`) to call the server."""
    max_requests: int = Field(1024, ge=1)
    """Requests for samples that may wait or be sampled at once; others get status 429 and try again
    later."""
    take_turns: Annotated[bool, Env("ART_TAKE_TURNS")] = False
    """Sample and train in turns: requests wait while a step trains, and a step waits for requests
    that are being sampled."""
    mps: Annotated[bool, Env("ART_MPS")] = False
    """Let engine and learner compute at once on a GPU that they share, by CUDA MPS, instead of
    switching between them. If one of the two dies, both start again."""
    keep_rollouts: Annotated[pydantic.ByteSize, Env("ART_KEEP_ROLLOUTS")] = Field(
        pydantic.ByteSize(2_000_000_000), ge=0
    )
    """Disk space for the attempts and tokens of trained steps, which the page shows, such as
    `500MB`; the oldest steps are deleted first, and 0 keeps none."""
    dollars_per_hour: Annotated[float, Env("ART_DOLLARS_PER_HOUR")] = Field(0, ge=0)
    """Price of this machine, for the page; 0 means unknown."""
    exit_when_idle: Annotated[float, Env("ART_IDLE_MINUTES")] = Field(0, ge=0)
    """Exit after this many minutes without sampling or training; 0 means never."""
    max_hours: Annotated[float, Env("ART_MAX_HOURS")] = Field(0, ge=0)
    """Exit after this many hours, even while training; 0 means never."""
    wandb_api_key: Annotated[SecretStr | None, Env("WANDB_API_KEY")] = None
    """Key for Weights & Biases, which then gets a run for every model; None disables it."""
    bucket: Annotated[str | None, Env("ART_BUCKET")] = None
    """Bucket that the state directory is mounted from, if any; it keeps the checkpoints safe."""
    lora: LoraConfig = LoraConfig()
    """LoRA settings of a new model."""

    @pydantic.model_validator(mode="after")
    def _settings_agree(self) -> "ServerConfig":
        for name in ("nodes", "engine_nodes"):
            if getattr(self, name) > 1 and not self.ray:
                raise ValueError(f"{name} is `{getattr(self, name)}`, but ray is not set")
        if self.engine_nodes > 1 and self.engine == "embedded":
            raise ValueError("engine is `embedded`, which needs engine_nodes to be 1")
        if self.nodes > 1 and self.quantization:
            raise ValueError(f"quantization is `{self.quantization}`, which needs nodes to be 1")
        if self.mps and self.ray:
            raise ValueError("mps is set, which needs ray to be unset")
        unused = {"lora", "nodes", "learner_devices", "take_turns", "mps"} & self.model_fields_set
        if self.checkpoint and unused:
            raise ValueError(f"{min(unused)} is for training, but checkpoint is set")
        return self

    @property
    def state_path(self) -> Path:
        """The state directory as an absolute path, with `~` expanded."""
        return Path(self.state_dir).expanduser().resolve()

    @property
    def requires_key(self) -> bool:
        """Whether clients must send a key. The control clients of ART and NAT send none, so it is
        optional on loopback."""
        return self.require_key or not is_loopback(self.host)


def _split(value: Any) -> Any:
    """The names in an environment variable, which is one text."""
    return value.replace(",", " ").split() if isinstance(value, str) else value


def _json(value: Any) -> Any:
    """The object in an environment variable, which is one text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from error


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
