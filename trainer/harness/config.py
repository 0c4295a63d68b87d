"""The config file of `trainer finetune`: NVIDIA's finetuning YAML, plus our additions.

Each component has a name and a `_type`: one of ours, or the user's `module:Class`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pydantic
from pydantic import Field, SecretStr

from kit.config import Config
from trainer.harness.components import (
    CustomConfig,
    DatasetConfig,
    EnvironmentRewardConfig,
    EvaluatorConfig,
    TrainerAdapterConfig,
    TrainerConfig,
    TrajectoryBuilderConfig,
)
from trainer.harness.workflow_config import EnvironmentConfig, WorkflowConfig

ReportTo = Literal["wandb", "tensorboard", "mlflow", "langfuse", "openpipe"]
WHOLE_WORKFLOW = "<workflow>"


class LlmConfig(Config):
    """An LLM behind an OpenAI-compatible endpoint."""

    type: Literal["openai"] = Field(alias="_type")
    model_name: str
    """The model's name at the endpoint."""
    base_url: str = "http://localhost:8000/v1"
    """Base URL of the endpoint. The default is that of `trainer serve`."""
    api_key: SecretStr = SecretStr("default")
    """API key, sent as a bearer token."""
    temperature: float | None = Field(None, ge=0, le=2)
    """Sampling temperature. Defaults to the endpoint's."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Nucleus sampling: the probability mass to sample from. Defaults to the endpoint's."""
    max_tokens: int | None = Field(None, ge=1)
    """Longest completion, in tokens. Defaults to the rest of the context."""
    seed: int | None = None
    """Seed sent with every request. By default, each request is sampled with a new seed."""
    max_retries: int = Field(24, ge=0)
    """Retries of a call when the endpoint is unreachable or overloaded. The default lasts two
    minutes or more, within the run's `run_timeout`. Unless you set this, an endpoint that has never
    answered gets only 8."""
    request_timeout: float = Field(600, gt=0)
    """Time limit of one call, in seconds."""

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling settings for the body of every request."""
        return self.model_dump(
            include={"temperature", "top_p", "max_tokens", "seed"}, exclude_none=True
        )


class EvalGeneralConfig(Config):
    """How the workflow is run on a dataset."""

    max_concurrency: int = Field(8, ge=1)
    """Number of workflow runs at the same time."""
    output_dir: Path = Path(".tmp/nat/examples/default")
    """Directory for the output and reward of every run: one JSONL file per epoch."""
    dataset: DatasetConfig | None = None
    """The examples to train on."""
    run_timeout: float = Field(600, gt=0)
    """Time limit in seconds of one workflow run, and of an evaluator on the runs of one example.
    Runs that exceed it are lost."""
    on_failure: Literal["continue", "stop"] = "continue"
    """`continue` counts failed runs and trains on the others. `stop` ends the training."""


class EvalConfig(Config):
    """The dataset and the evaluators."""

    general: EvalGeneralConfig = EvalGeneralConfig()
    """How the workflow is run on a dataset."""
    evaluators: dict[str, EvaluatorConfig] = Field(default_factory=dict)
    """Evaluators by name. One gives the reward; the others give metrics."""


class RewardFunctionConfig(Config):
    """The choice of the evaluator that gives the reward."""

    name: str
    """Name of the evaluator in `eval.evaluators`."""


class CurriculumConfig(Config):
    """Curriculum learning: train on the easiest groups first, and add harder ones over time."""

    enabled: bool = False
    """Choose groups by difficulty. If false, every group is used."""
    initial_percentile: float = Field(0.3, gt=0, le=1)
    """Fraction of the groups to start with."""
    increment_percentile: float = Field(0.2, gt=0, le=1)
    """Fraction of the groups that each expansion adds."""
    expansion_interval: int = Field(5, ge=1)
    """Epochs between expansions."""
    min_reward_diff: float = Field(0.1, ge=0)
    """Skip groups whose best and worst rewards differ by less than this."""
    sort_ascending: bool = False
    """Start with the hardest groups instead of the easiest."""
    random_subsample: float | None = Field(None, gt=0, le=1)
    """Train on at most this fraction of the groups, chosen at random."""


class EarlyStoppingConfig(Config):
    """Stop when a metric stops rising or reaches a target."""

    metric: Literal["validation/avg_reward", "avg_reward"] = "validation/avg_reward"
    """Metric to watch: the mean reward of validation or of training."""
    patience: int = Field(3, ge=1)
    """Number of measurements without a gain before the run stops."""
    min_delta: float = Field(0.0, ge=0)
    """Smallest increase that counts as a gain."""
    target: float | None = None
    """Stop as soon as the metric reaches this value."""


class FinetuningConfig(Config):
    """The training run: its components, its length and its output."""

    enabled: bool = False
    """Enable training. If false, `trainer finetune` does nothing."""
    trainer: str | None = None
    """The trainer to use, by its name in `trainers`."""
    trajectory_builder: str | None = None
    """The trajectory builder to use, by its name in `trajectory_builders`."""
    trainer_adapter: str | None = None
    """The trainer adapter to use, by its name in `trainer_adapters`."""
    reward_function: RewardFunctionConfig | None = None
    """The evaluator that gives the reward. Required only if there are several."""
    target_functions: list[str] = Field(default_factory=lambda: [WHOLE_WORKFLOW])
    """Train only on calls from these named parts of the workflow. `<workflow>` means all of it."""
    target_model: str | None = None
    """Train only on calls to this LLM, by its name in `llms`. Defaults to the workflow's LLM."""
    curriculum_learning: CurriculumConfig = CurriculumConfig()
    """Which groups each epoch trains on."""
    num_epochs: int = Field(1, ge=1)
    """Number of epochs. Each samples trajectories and trains on them."""
    output_dir: Path = Path(".tmp/nat/finetuning")
    """Directory for metrics, histories and the plot."""
    max_steps_off_policy: int = Field(0, ge=0, le=31)
    """Greatest age of a run when it is trained: the steps trained since it was sampled. 0 takes
    turns: an epoch samples, then trains. With 1 or more, the next groups are sampled while a step
    trains, an epoch is one step, and runs that are older are lost as `stale`."""
    groups_per_step: int | None = Field(None, ge=1)
    """With `max_steps_off_policy`, a step trains when this many groups with different rewards are
    complete. Defaults to the builder's `examples_per_epoch`, or to the whole dataset."""
    oversample: float = Field(1.5, ge=1)
    """With `max_steps_off_policy`, at most this many times `groups_per_step` groups are sampled for
    a step, because groups with equal rewards are replaced and stragglers are not waited for."""
    pin_runs: bool = False
    """With `max_steps_off_policy`, sample all calls of a run from the step that was served when its
    group began. Otherwise each call takes the newest step, and the engine reads the conversation
    from its beginning again whenever that has changed."""
    early_stopping: EarlyStoppingConfig | None = None
    """When to stop before the last epoch. By default, all epochs run."""
    report_to: list[ReportTo] = Field(default_factory=list)
    """Services that also receive the metrics. Each needs its own package."""
    seed: int = 0
    """Seed of the harness's random choices, such as the order of examples."""

    @pydantic.model_validator(mode="after")
    def _check_complete(self) -> "FinetuningConfig":
        parts = ("trainer", "trajectory_builder", "trainer_adapter")
        missing = [name for name in parts if self.enabled and getattr(self, name) is None]
        if missing:
            raise ValueError(f"with `enabled: true`, {', '.join(missing)} must be set")
        return self


class FinetuneConfig(Config):
    """The whole config file."""

    llms: dict[str, LlmConfig] = Field(default_factory=dict)
    """LLMs by name."""
    workflow: WorkflowConfig
    """The agent to train."""
    eval: EvalConfig = EvalConfig()
    """The dataset and the evaluators."""
    trajectory_builders: dict[str, TrajectoryBuilderConfig] = Field(default_factory=dict)
    """Trajectory builders by name. `finetuning.trajectory_builder` chooses one."""
    trainer_adapters: dict[str, TrainerAdapterConfig] = Field(default_factory=dict)
    """Trainer adapters by name. `finetuning.trainer_adapter` chooses one."""
    trainers: dict[str, TrainerConfig] = Field(default_factory=dict)
    """Trainers by name. `finetuning.trainer` chooses one."""
    finetuning: FinetuningConfig = FinetuningConfig()
    """The training run: its components, its length and its output."""

    @property
    def evaluators(self) -> Mapping[str, Any]:
        """Evaluators by name. An environment brings one of its own, if none of these is it."""
        given = self.eval.evaluators
        own = any(isinstance(one, EnvironmentRewardConfig) for one in given.values())
        if own or not isinstance(self.workflow, EnvironmentConfig):
            return given
        return {"environment": EnvironmentRewardConfig(_type="environment"), **given}

    @property
    def takes_turns_for(self) -> str | None:
        """The user's own component that cannot sample ahead, or None."""
        builder = self.trajectory_builders.get(self.finetuning.trajectory_builder or "")
        if isinstance(builder, CustomConfig):
            return "trajectory_builder"
        trainer = self.trainers.get(self.finetuning.trainer or "")
        return "trainer" if isinstance(trainer, CustomConfig) else None

    @property
    def reward_name(self) -> str:
        """Name of the evaluator that gives the reward."""
        if given := self.finetuning.reward_function:
            return given.name
        for name, evaluator in self.evaluators.items():
            if isinstance(evaluator, EnvironmentRewardConfig):
                return name
        return next(iter(self.evaluators))
