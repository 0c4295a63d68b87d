"""Settings of every replaceable component, each chosen by its `_type`."""

from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Discriminator, Field, Tag

from kit.config import Config
from trainer.harness.backend_config import ArtBackendConfig, TrainingArgs

CUSTOM = "module:Class"


def type_of(value: Any) -> str | None:
    """Return the union tag of a mapping: its `_type`, or `CUSTOM` for any `module:Class`."""
    name = value.get("_type") if isinstance(value, dict) else getattr(value, "type", None)
    return CUSTOM if isinstance(name, str) and ":" in name else name


class CustomConfig(pydantic.BaseModel):
    """A component written by the user: `_type: module:Class`. All other keys are its arguments."""

    model_config = pydantic.ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    type: str = Field(alias="_type")
    """`module:Class`, importable from the working directory or the environment."""

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


Custom = Annotated[CustomConfig, Tag(CUSTOM)]


# Dataset


class DatasetStructure(Config):
    """The names of a dataset's fields."""

    question_key: str = "question"
    """Field with the workflow's input. Every example needs one."""
    answer_key: str = "answer"
    """Field with the expected answer, for evaluators. May be absent."""


class FileDatasetConfig(Config):
    """Examples in a file: a JSON list, JSON lines or CSV."""

    type: Literal["json", "jsonl", "csv"] = Field(alias="_type")
    """Format of the file."""
    file_path: Path
    """Path of the file, relative to the directory where the command runs."""
    id_key: str = "id"
    """Field that identifies an example. Its values must be unique."""
    structure: DatasetStructure = DatasetStructure()
    """Names of the other fields."""


DatasetConfig = Annotated[
    Annotated[FileDatasetConfig, Tag("json")]
    | Annotated[FileDatasetConfig, Tag("jsonl")]
    | Annotated[FileDatasetConfig, Tag("csv")]
    | Custom,
    Discriminator(type_of),
]


# Evaluators


class ExactMatchConfig(Config):
    """Scores 1 if the output equals the expected answer, else 0."""

    type: Literal["exact_match"] = Field(alias="_type")
    ignore_case: bool = False
    """Compare without regard to case."""
    strip: bool = True
    """Ignore white space at both ends."""


class ContainsConfig(Config):
    """Scores 1 if the output contains the expected answer, else 0."""

    type: Literal["contains"] = Field(alias="_type")
    ignore_case: bool = True
    """Compare without regard to case."""


class RegexConfig(Config):
    """Scores 1 if the pattern matches anywhere in the output, else 0."""

    type: Literal["regex"] = Field(alias="_type")
    pattern: str
    """Python regular expression. If it has a group, the first group must equal the expected
    answer."""
    ignore_case: bool = False
    """Match without regard to case."""


class JsonSchemaConfig(Config):
    """Scores 1 if the output is JSON that satisfies the schema, else 0."""

    type: Literal["json_schema"] = Field(alias="_type")
    json_schema: dict[str, Any] = Field(alias="schema")
    """The JSON schema."""


class PythonEvaluatorConfig(Config):
    """A function written by the user: `function(run, **args)` returns a number, or a dict with
    `reward` and other metrics."""

    type: Literal["python"] = Field(alias="_type")
    function: str
    """`module:callable`, sync or async."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Extra keyword arguments for the function."""


class LlmJudgeConfig(Config):
    """Another LLM scores each run from 0 to 1, and says why in a sentence."""

    type: Literal["llm_judge"] = Field(alias="_type")
    llm: str
    """The judge, by its name in `llms`."""
    instructions: str = "Score how well the answer solves the task."
    """The judge's instructions. The task, the expected answer and the answer follow them."""


class RulerConfig(Config):
    """Another LLM compares all runs of an example and scores each from 0 to 1, as ART's RULER
    does, with a sentence for each."""

    type: Literal["ruler"] = Field(alias="_type")
    llm: str
    """The judge, by its name in `llms`."""
    instructions: str = "Higher scores for attempts that come closer to the goal of the task."
    """The rubric. The task and all attempts follow it."""


class IntermediateStepsConfig(Config):
    """Combines the rewards that the workflow reported with `llm.reward(...)` during the run."""

    type: Literal["intermediate_steps"] = Field(alias="_type")
    aggregate: Literal["sum", "mean", "last", "discounted"] = "sum"
    """How the rewards are combined. A run without rewards scores 0."""
    discount: float = Field(0.9, gt=0, le=1)
    """With `aggregate: discounted`, the weight of each reward relative to the next one."""


class WeightedSumConfig(Config):
    """Adds up the weighted scores of other evaluators, and keeps each score as a metric."""

    type: Literal["weighted_sum"] = Field(alias="_type")
    weights: dict[str, float] = Field(min_length=1)
    """Weight of each evaluator, by its name in `eval.evaluators`."""


class EnvironmentRewardConfig(Config):
    """The reward of the environment that the workflow runs, and its metrics. It is the default
    with `_type: verifiers` and `_type: gymnasium`."""

    type: Literal["environment"] = Field(alias="_type")


class MathVerifyConfig(Config):
    """Scores 1 if the output and the expected answer are mathematically equal, else 0. Needs the
    package `math-verify`."""

    type: Literal["math_verify"] = Field(alias="_type")
    precision: int = Field(6, ge=0)
    """Decimal places in which two numbers must agree."""
    strict: bool = True
    """Tell variables, sets and intervals apart as written. If false, `x` and `y` are equal."""


class InspectScorerConfig(Config):
    """A scorer of the package `inspect-ai`. Its value is the score; `C` (correct) counts
    as 1 and `I` (incorrect) as 0."""

    type: Literal["inspect_ai"] = Field(alias="_type")
    scorer: str
    """Name of a built-in scorer, such as `match` or `includes`, or `module:function` of your
    own."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the scorer."""


EvaluatorConfig = Annotated[
    Annotated[ExactMatchConfig, Tag("exact_match")]
    | Annotated[ContainsConfig, Tag("contains")]
    | Annotated[RegexConfig, Tag("regex")]
    | Annotated[JsonSchemaConfig, Tag("json_schema")]
    | Annotated[PythonEvaluatorConfig, Tag("python")]
    | Annotated[LlmJudgeConfig, Tag("llm_judge")]
    | Annotated[RulerConfig, Tag("ruler")]
    | Annotated[IntermediateStepsConfig, Tag("intermediate_steps")]
    | Annotated[WeightedSumConfig, Tag("weighted_sum")]
    | Annotated[EnvironmentRewardConfig, Tag("environment")]
    | Annotated[MathVerifyConfig, Tag("math_verify")]
    | Annotated[InspectScorerConfig, Tag("inspect_ai")]
    | Custom,
    Discriminator(type_of),
]


# The three components of the harness


class ArtTrajectoryBuilderConfig(Config):
    """Runs the workflow several times per example and groups the trajectories."""

    type: Literal["openpipe_art_traj_builder"] = Field(alias="_type")
    num_generations: int = Field(2, ge=1)
    """Trajectories per example. More give GRPO a better signal and take longer."""
    examples_per_epoch: int | None = Field(None, ge=1)
    """Examples per epoch. No example repeats until all have been used. The default is the whole
    dataset."""


class ArtTrainerAdapterConfig(Config):
    """Sends trajectories to a backend that speaks ART's protocol, such as `trainer serve`."""

    type: Literal["openpipe_art_trainer_adapter"] = Field(alias="_type")
    backend: ArtBackendConfig
    """Address of the backend, and the model to train there."""
    training: TrainingArgs = TrainingArgs()
    """Settings of every GRPO step."""
    wait_for_backend: float = Field(120, ge=0)
    """Seconds to wait for a backend that stops answering. Unless you set this, the first connection
    waits only 5 seconds."""


class ArtTrainerConfig(Config):
    """The epoch loop. It has no settings; see `finetuning`."""

    type: Literal["openpipe_art_trainer"] = Field(alias="_type")


TrajectoryBuilderConfig = Annotated[
    Annotated[ArtTrajectoryBuilderConfig, Tag("openpipe_art_traj_builder")] | Custom,
    Discriminator(type_of),
]
TrainerAdapterConfig = Annotated[
    Annotated[ArtTrainerAdapterConfig, Tag("openpipe_art_trainer_adapter")] | Custom,
    Discriminator(type_of),
]
TrainerConfig = Annotated[
    Annotated[ArtTrainerConfig, Tag("openpipe_art_trainer")] | Custom, Discriminator(type_of)
]
