"""The file that `trainer finetune` reads: NVIDIA's finetuning YAML as it stands, and our additions.

Components are named and typed: `_type` is one of ours, or `module:Class` of the user's.
"""

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import pydantic
import yaml
from pydantic import Field, SecretStr

from kit.config import Config, Location, read_yaml, validate
from kit.errors import ConfigError
from trainer.harness.components import (
    Dataset,
    Evaluator,
    Trainer,
    TrainerAdapter,
    TrajectoryBuilder,
    Workflow,
)

ReportTo = Literal["wandb", "tensorboard", "mlflow", "langfuse", "openpipe"]
WHOLE_WORKFLOW = "<workflow>"


class LlmConfig(Config):
    """An LLM behind an OpenAI-compatible endpoint."""

    type: Literal["openai"] = Field(alias="_type")
    model_name: str
    """Name under which the endpoint serves the model."""
    base_url: str = "http://localhost:8000/v1"
    """The endpoint; the one of `trainer serve` by default."""
    api_key: SecretStr = SecretStr("default")
    """Sent as bearer token."""
    temperature: float | None = Field(None, ge=0, le=2)
    """Sampling temperature; None is the endpoint's default."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Nucleus sampling; None is the endpoint's default."""
    max_tokens: int | None = Field(None, ge=1)
    """Longest completion; None is what the context leaves."""
    seed: int | None = None
    """Seed of every request; None draws anew."""
    max_retries: int = Field(10, ge=0)
    """How often a call is made again when the endpoint is away or overloaded."""
    request_timeout: float = Field(600, gt=0)
    """Seconds that one call may take."""

    @property
    def sampling(self) -> dict[str, Any]:
        """What goes into the body of every request."""
        return self.model_dump(
            include={"temperature", "top_p", "max_tokens", "seed"}, exclude_none=True
        )


class EvalGeneral(Config):
    """How the workflow is run on a dataset."""

    max_concurrency: int = Field(8, ge=1)
    """Runs of the workflow at the same time."""
    output_dir: Path = Path(".tmp/nat/examples/default")
    """Where every run's output and reward are written, a JSONL file per epoch."""
    dataset: Dataset | None = None
    """The examples that are trained on."""
    run_timeout: float = Field(600, gt=0)
    """Seconds that one run of the workflow may take; a longer one is a lost run."""
    on_failure: Literal["continue", "stop"] = "continue"
    """What a failed run does to the whole: it is counted, or it ends everything."""


class EvalConfig(Config):
    general: EvalGeneral = EvalGeneral()
    evaluators: dict[str, Evaluator] = Field(default_factory=dict)


class RewardFunction(Config):
    name: str
    """The evaluator whose score is the reward."""


class CurriculumConfig(Config):
    """Train on the easiest groups first, and on more of them as the epochs go by."""

    enabled: bool = False
    """Whether groups are chosen by their difficulty at all."""
    initial_percentile: float = Field(0.3, gt=0, le=1)
    """Share of the groups that the first epochs train on."""
    increment_percentile: float = Field(0.2, gt=0, le=1)
    """Share that every expansion adds."""
    expansion_interval: int = Field(5, ge=1)
    """Epochs between expansions."""
    min_reward_diff: float = Field(0.1, ge=0)
    """Groups whose rewards differ by less are left out: they teach nothing."""
    sort_ascending: bool = False
    """Hardest first instead of easiest first."""
    random_subsample: float | None = Field(None, gt=0, le=1)
    """Train on at most this share of the groups, drawn at random."""


class EarlyStopping(Config):
    """Stop when a metric no longer rises, or is good enough."""

    metric: Literal["validation/avg_reward", "avg_reward"] = "validation/avg_reward"
    """What is watched: the validation's mean reward, or that of training."""
    patience: int = Field(3, ge=1)
    """Measurements without a gain before the run stops."""
    min_delta: float = Field(0.0, ge=0)
    """A smaller gain counts as none."""
    target: float | None = None
    """Stop as soon as the metric reaches this."""


class FinetuningConfig(Config):
    enabled: bool = False
    """Nothing is trained while this is false."""
    trainer: str | None = None
    """Name in `trainers`."""
    trajectory_builder: str | None = None
    """Name in `trajectory_builders`."""
    trainer_adapter: str | None = None
    """Name in `trainer_adapters`."""
    reward_function: RewardFunction | None = None
    """The evaluator whose score is the reward; may be left out when there is only one."""
    target_functions: list[str] = Field(default_factory=lambda: [WHOLE_WORKFLOW])
    """Named parts of the workflow whose calls are trained on; `<workflow>` is all of them."""
    target_model: str | None = None
    """Name in `llms`: only its calls are trained on. None is the LLM of the workflow."""
    curriculum_learning: CurriculumConfig = CurriculumConfig()
    num_epochs: int = Field(1, ge=1)
    """Rounds of sampling and training."""
    output_dir: Path = Path(".tmp/nat/finetuning")
    """Where metrics, histories and the plot are written."""
    early_stopping: EarlyStopping | None = None
    """When to end before the last epoch; None never does."""
    report_to: list[ReportTo] = Field(default_factory=list)
    """Services that get the metrics too, each an optional package."""
    seed: int = 0
    """Seed of what the harness itself draws at random."""

    @pydantic.model_validator(mode="after")
    def _is_whole(self) -> "FinetuningConfig":
        parts = ("trainer", "trajectory_builder", "trainer_adapter")
        absent = [name for name in parts if self.enabled and getattr(self, name) is None]
        if absent:
            raise ValueError(f"with `enabled: true`, {', '.join(absent)} must be set")
        return self


class FinetuneConfig(Config):
    """The whole file."""

    llms: dict[str, LlmConfig] = Field(default_factory=dict)
    workflow: Workflow
    eval: EvalConfig = EvalConfig()
    trajectory_builders: dict[str, TrajectoryBuilder] = Field(default_factory=dict)
    trainer_adapters: dict[str, TrainerAdapter] = Field(default_factory=dict)
    trainers: dict[str, Trainer] = Field(default_factory=dict)
    finetuning: FinetuningConfig = FinetuningConfig()

    @property
    def reward_name(self) -> str:
        given = self.finetuning.reward_function
        return given.name if given else next(iter(self.eval.evaluators))


def load_config(path: Path, overrides: Sequence[tuple[str, str]] = ()) -> FinetuneConfig:
    """Read `path`, put the overrides in, and check that every name in it leads somewhere."""
    data, lines = read_yaml(path)
    for name, value in overrides:
        _override(data, lines, name, value)
    config = validate(FinetuneConfig, data, source=str(path), lines=lines)
    _check_names(config, str(path))
    return config


def _override(data: dict[str, Any], lines: dict[Location, int], name: str, text: str) -> None:
    """Set `finetuning.num_epochs` and the like; the value is read as YAML reads it."""
    *parents, leaf = name.split(".")
    at: Any = data
    place: Location = ()
    for part in parents:
        place = (*place, part)
        lines.setdefault(place, 0)
        at = at.setdefault(part, {})
        if not isinstance(at, dict):
            raise ConfigError(
                f"`-o {name}` cannot be set: `{'.'.join(map(str, place))}` holds no settings",
                hint="Name a setting of the file by its path, such as `finetuning.num_epochs`",
            )
    try:
        at[leaf] = _as_yaml(text)
    except yaml.YAMLError as exc:
        raise ConfigError(
            f"`-o {name} {text}` is not a value", hint="Write it as in the YAML file"
        ) from exc
    lines[(*place, leaf)] = 0


def _as_yaml(text: str) -> Any:
    """A value as the file would have it; PyYAML alone takes `1e-6` for text."""
    try:
        return float(text) if not text.lstrip("+-").isdigit() else int(text)
    except ValueError:
        return yaml.safe_load(text)


def _check_names(config: FinetuneConfig, source: str) -> None:
    """Refuse, all at once, names that lead nowhere."""
    told: list[str] = []

    def check(setting: str, name: str | None, known: Iterable[str]) -> None:
        names = list(known)
        if name is None or name in names:
            return
        near = difflib.get_close_matches(name, names, n=1)
        told.append(
            f"`{setting}` names `{name}`, which does not exist"
            + (f", did you mean `{near[0]}`?" if near else "")
        )

    finetuning = config.finetuning
    check("workflow.llm", getattr(config.workflow, "llm", None), config.llms)
    check("finetuning.trainer", finetuning.trainer, config.trainers)
    check("finetuning.trainer_adapter", finetuning.trainer_adapter, config.trainer_adapters)
    check(
        "finetuning.trajectory_builder", finetuning.trajectory_builder, config.trajectory_builders
    )
    check("finetuning.target_model", finetuning.target_model, config.llms)
    if finetuning.reward_function:
        name = finetuning.reward_function.name
        check("finetuning.reward_function.name", name, config.eval.evaluators)
    for name, evaluator in config.eval.evaluators.items():
        check(f"eval.evaluators.{name}.llm", getattr(evaluator, "llm", None), config.llms)
        for part in getattr(evaluator, "weights", {}):
            check(f"eval.evaluators.{name}.weights", part, config.eval.evaluators)
    if finetuning.enabled:
        told += _missing(config)
    if told:
        raise ConfigError(
            f"`{source}` has {len(told)} fault{'s' * (len(told) > 1)}: " + "; ".join(told),
            hint="Define what is named, or mend the name",
        )


def _missing(config: FinetuneConfig) -> list[str]:
    told = []
    if config.eval.general.dataset is None:
        told.append("`eval.general.dataset` is required when finetuning is enabled")
    if not config.eval.evaluators:
        told.append("`eval.evaluators` must define a reward")
    elif config.finetuning.reward_function is None and len(config.eval.evaluators) > 1:
        told.append("`finetuning.reward_function` must name one of several evaluators")
    return told
