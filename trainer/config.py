"""What a user can set where the model is: the server, the LoRA and the GRPO step."""

import ipaddress
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field, SecretStr

from kit.config import Config, validate
from kit.settings import Env
from kit.state_dir import STATE_DIR

DEVICES = r"^\d+(,\d+)*$"
Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LoraConfig(Config):
    """The low-rank weights that are trained."""

    rank: int = Field(8, ge=1, le=512)
    """Rank of every LoRA pair."""
    alpha: float = Field(16.0, gt=0)
    """The LoRA's output is scaled by alpha / rank."""
    targets: tuple[Target, ...] = (
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
    """One GRPO step. Names and defaults are ART's, where ART has the setting."""

    learning_rate: float = Field(5e-5, gt=0)
    """AdamW learning rate of the trained weights."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls to zero at `max_steps`."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises to its full value."""
    max_steps: int | None = Field(None, ge=1)
    """Last step of the schedule; needed unless the schedule is constant."""
    scale_learning_rate_by_reward_std_dev: bool = False
    """Multiply the learning rate by the mean standard deviation of the groups' rewards."""
    num_trajectories_learning_rate_multiplier_power: float = Field(0.0, ge=0)
    """Multiply the learning rate by this power of the gradient step's number of trajectories."""
    weight_decay: float = Field(0.1, ge=0)
    """AdamW weight decay."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's decay of the mean gradient."""
    adam_beta2: float = Field(0.99, ge=0, lt=1)
    """AdamW's decay of the mean squared gradient."""
    adam_epsilon: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    max_grad_norm: float = Field(0.1, gt=0)
    """Gradients are clipped to this norm."""
    grad_accumulation_sequences: int | None = Field(None, ge=1)
    """Packed rows in one gradient step; None is one."""

    scale_rewards: bool = False
    """Divide a group's advantages by the standard deviation of its rewards. Off by default: it
    weighs groups by their difficulty."""
    scale_advantages: bool = True
    """Scale the advantages of a step to a mean size of one, as ART does."""
    advantage_balance: float = Field(0.0, ge=-1, le=1)
    """1 trains on positive advantages only, -1 on negative ones only, 0 on both alike."""
    loss_mean: Literal["trajectory", "token"] = "trajectory"
    """Whether every trajectory weighs the same (as in ART), or every token."""

    ppo: bool = False
    """PPO's clipped loss in place of CISPO's clipped importance weight."""
    epsilon: float | None = Field(None, ge=0)
    """Lower clip of the ratio, 1 - epsilon; None is 1.0, or 0.2 with `ppo`."""
    epsilon_high: float | None = Field(None, ge=0)
    """Upper clip of the ratio, 1 + epsilon_high; None is 4.0, or `epsilon` with `ppo`."""
    dual_clip: float | None = Field(None, gt=1)
    """With `ppo`: the loss of a token with negative advantage is at most this times its size."""
    importance_sampling_level: Literal["token", "sequence", "average", "geometric_average"] = (
        "token"
    )
    """What the ratio is taken over; `sequence` is GSPO."""
    mask_prob_ratio: bool = False
    """Drop tokens whose ratio is outside the clip range."""
    max_negative_advantage_importance_sampling_weight: float | None = Field(None, gt=0)
    """Largest ratio of tokens with a negative advantage."""
    kimi_k2_tau: float | None = Field(None, gt=0)
    """Subtract tau * (new - old logprob) from the advantage."""
    precalculate_logprobs: bool = False
    """Take the learner's own logprobs before the first gradient step as the old ones."""
    truncated_importance_sampling: float | None = Field(None, gt=0)
    """Weigh each token by learner over sampler probability, at most this; the learner's logprobs
    are then precalculated."""
    allow_training_without_logprobs: bool = False
    """Train on choices that came without logprobs, taken as sampled by the current policy."""

    kl_penalty_coef: float = Field(0.0, ge=0)
    """Weight of the penalty for leaving the reference."""
    kl_penalty: Literal["advantage", "k3"] = "advantage"
    """ART's shaping of the advantages, or the k3 estimate as a term of the loss."""
    kl_ref_adapter_path: str | None = None
    """Checkpoint that is the reference; None is the base model."""

    packed_sequence_length: int | None = Field(None, ge=16)
    """Tokens in a packed row; None is the longest sequence, rounded up to 2,048."""
    max_seq_length: int | None = Field(None, ge=16)
    """Longest sequence; a longer trajectory is dropped and counted. None is the model's limit."""
    logprob_calculation_chunk_size: int | None = Field(None, ge=1)
    """Tokens whose logits are in memory at once; None is 8,192 on a GPU, 1,024 elsewhere."""
    activation_checkpointing: bool | None = None
    """Recompute each layer in the backward pass: slower, with far less memory. None does so on a
    GPU for as many layers as its free memory asks for, on several for all."""
    plot_tensors: bool = False
    """Write a picture of the packed rows beside the checkpoint."""

    @pydantic.model_validator(mode="after")
    def _fits(self) -> "GrpoConfig":
        if self.lr_scheduler_type != "constant" and self.max_steps is None:
            raise ValueError(f"lr_scheduler_type `{self.lr_scheduler_type}` needs max_steps")
        if self.dual_clip is not None and not self.ppo:
            raise ValueError("dual_clip needs ppo")
        if self.kl_ref_adapter_path is not None and not self.kl_penalty_coef:
            raise ValueError("kl_ref_adapter_path needs kl_penalty_coef")
        return self

    @property
    def clip_range(self) -> tuple[float, float]:
        """Lowest and highest ratio."""
        low = self.epsilon if self.epsilon is not None else (0.2 if self.ppo else 1.0)
        high = self.epsilon_high if self.epsilon_high is not None else (low if self.ppo else 4.0)
        return 1 - low, 1 + high


class SftConfig(Config):
    """One supervised step: cross-entropy over what the assistants of trajectories said."""

    kind: Literal["sft"] = "sft"
    """Tells the settings of such a step from those of a GRPO step."""
    learning_rate: float | tuple[float, ...] = 5e-5
    """AdamW learning rate, of all gradient steps or one for each."""
    batch_size: int | Literal["auto"] = "auto"
    """Trajectories in one gradient step; `auto` is ART's 2."""
    max_seq_length: int | None = Field(None, ge=16)
    """Longest sequence; a longer trajectory is dropped and counted. None is the model's limit."""

    @pydantic.model_validator(mode="after")
    def _is_positive(self) -> "SftConfig":
        rates = (
            self.learning_rate if isinstance(self.learning_rate, tuple) else [self.learning_rate]
        )
        if not rates or min(rates) <= 0:
            raise ValueError(f"learning_rate is `{self.learning_rate}`, not above zero")
        if isinstance(self.batch_size, int) and self.batch_size < 1:
            raise ValueError(f"batch_size is `{self.batch_size}`, not at least 1")
        return self

    @property
    def trajectories_a_step(self) -> int:
        return 2 if self.batch_size == "auto" else self.batch_size

    def rates(self, steps: int) -> list[float]:
        """The learning rate of each gradient step; a list may be longer than needed."""
        if isinstance(self.learning_rate, float):
            return [self.learning_rate] * steps
        return list(self.learning_rate[:steps])


StepConfig = GrpoConfig | SftConfig


def read_step_config(values: dict[str, Any]) -> StepConfig:
    """The settings of a step, of either kind, as they were written down."""
    kind: type[GrpoConfig | SftConfig] = SftConfig if values.get("kind") == "sft" else GrpoConfig
    return validate(kind, values, source="config")


class ServerConfig(Config):
    """`trainer serve`."""

    base_model: Annotated[str | None, Env("BASE_MODEL")] = None
    """Model to load at start: a built-in name, a directory or a hub id."""
    engine: Literal["auto", "vllm", "embedded"] = "auto"
    """What samples tokens; `auto` is vLLM where a CUDA card and vLLM are found."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Settings of `vllm serve` by their Python names, such as `gpu_memory_utilization`."""
    quantization: Literal["fp8"] | None = None
    """Frozen weights in fp8, in engine and learner alike: faster, and less exact."""
    vllm: Annotated[str | None, Env("ART_VLLM")] = None
    """Python of another environment that has vLLM; None is the one this server runs in."""
    host: str = "127.0.0.1"
    """Address both ports bind."""
    port: int = Field(7999, ge=0, le=65535)
    """Port of the control API."""
    openai_port: int = Field(8000, ge=0, le=65535)
    """Port of the OpenAI-compatible API."""
    state_dir: str = STATE_DIR
    """Where models, checkpoints and logs live."""
    engine_devices: str | None = Field(None, pattern=DEVICES)
    """GPUs of the engine, such as `0,1`; None is its share of those that are not the learner's."""
    learner_devices: str | None = Field(None, pattern=DEVICES)
    """GPUs of the learner, one process each; None is those that are not the engine's."""
    nodes: int = Field(1, ge=1)
    """Machines that train a step together, this one included; the others run `trainer engine`."""
    nodes_host: str | None = None
    """Address where this machine takes the engines of others, all of whom need `api_key`."""
    nodes_port: int = Field(7998, ge=0, le=65535)
    """Port of `nodes_host` that `trainer engine` dials; at the one below the learners meet."""
    api_key: Annotated[SecretStr | None, Env("ART_API_KEY")] = None
    """Bearer token asked of every client when `host` is not loopback."""
    require_key: bool = False
    """Ask for the key on loopback too."""
    exit_when_idle: Annotated[float, Env("ART_IDLE_MINUTES")] = Field(0, ge=0)
    """Exit after this many minutes without sampling or training; 0 stays."""
    max_hours: Annotated[float, Env("ART_MAX_HOURS")] = Field(0, ge=0)
    """Exit after this many hours whatever happens; 0 stays."""
    wandb_api_key: Annotated[SecretStr | None, Env("WANDB_API_KEY")] = None
    """Key of Weights & Biases, where every model then has a run; None reports nowhere."""
    bucket: Annotated[str | None, Env("ART_BUCKET")] = None
    """Bucket that the state directory is mounted from, if any: checkpoints are safe there."""
    lora: LoraConfig = LoraConfig()
    """Shape of the LoRA of a new model."""

    @pydantic.model_validator(mode="after")
    def _fits_together(self) -> "ServerConfig":
        if self.nodes > 1 and not self.nodes_host:
            raise ValueError(f"nodes is `{self.nodes}`, and nodes_host is not set")
        if self.nodes > 1 and self.quantization:
            raise ValueError(f"quantization is `{self.quantization}`, which needs nodes to be 1")
        return self

    @property
    def state_path(self) -> Path:
        """The state directory as an absolute path, with `~` expanded."""
        return Path(self.state_dir).expanduser().resolve()

    @property
    def learner_address(self) -> str:
        """HOST:PORT of the learner's first process."""
        return f"{self.nodes_host}:{self.nodes_port - 1}"

    @property
    def requires_key(self) -> bool:
        """On loopback only where asked for: the control clients of ART and NAT send no key."""
        return self.require_key or not is_loopback(self.host)


class NodeConfig(Config):
    """`trainer engine`: what a machine that joins another's server decides for itself."""

    head: str = Field(pattern=r"^https?://[^/]+/?$")
    """Where the server takes engines: `http://` and its `nodes_host` and `nodes_port`."""
    vllm: Annotated[str | None, Env("ART_VLLM")] = None
    """Python of another environment that has vLLM; None is the one this program runs in."""
    engine_devices: str | None = Field(None, pattern=DEVICES)
    """GPUs of the engine, such as `0,1`; None is its share of those that are not the learner's."""
    learner_devices: str | None = Field(None, pattern=DEVICES)
    """GPUs of the learner, one process each; None is those that are not the engine's."""
    node_dir: str = f"{STATE_DIR}/nodes"
    """Where LoRAs and logs live, in a directory of the machine's name."""
    api_key: Annotated[SecretStr | None, Env("ART_API_KEY")] = None
    """The server's key."""
    patience: float = Field(30, gt=0)
    """Exit when the server was not reached for so many minutes: it may be gone for good."""


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
