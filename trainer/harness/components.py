"""Settings of the replaceable parts: workflow, dataset, evaluators, builder, adapter, trainer."""

from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Discriminator, Field, Tag

from kit.config import Config
from trainer.config import GrpoConfig

CUSTOM = "module:Class"


def _type_of(value: Any) -> str | None:
    """Which member of a union a mapping is: its `_type`, or one tag for all of the user's own."""
    name = value.get("_type") if isinstance(value, dict) else getattr(value, "type", None)
    return CUSTOM if isinstance(name, str) and ":" in name else name


class CustomConfig(pydantic.BaseModel):
    """A component of the user's own: `_type: module:Class`; the other keys are its arguments."""

    model_config = pydantic.ConfigDict(extra="allow", frozen=True)

    type: str = Field(alias="_type")

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


_Custom = Annotated[CustomConfig, Tag(CUSTOM)]


# Workflow


class PythonWorkflow(Config):
    """A function of the user's: `function(example, llm, **args)`, sync or async."""

    type: Literal["python", "langchain", "langgraph", "llama_index", "google_adk"] = Field(
        alias="_type"
    )
    function: str
    """`module:callable`. With a framework: a factory that gets its LLM and returns an agent."""
    llm: str
    """Name in `llms` that the workflow speaks to."""
    args: dict[str, Any] = Field(default_factory=dict)
    """More keyword arguments of the function."""


Workflow = Annotated[
    Annotated[PythonWorkflow, Tag("python")]
    | Annotated[PythonWorkflow, Tag("langchain")]
    | Annotated[PythonWorkflow, Tag("langgraph")]
    | Annotated[PythonWorkflow, Tag("llama_index")]
    | Annotated[PythonWorkflow, Tag("google_adk")]
    | _Custom,
    Discriminator(_type_of),
]


# Dataset


class DatasetStructure(Config):
    question_key: str = "question"
    """Field that is given to the workflow."""
    answer_key: str = "answer"
    """Field that evaluators compare with."""


class JsonDataset(Config):
    """Examples in a file: a JSON list, JSON lines or CSV."""

    type: Literal["json", "jsonl", "csv"] = Field(alias="_type")
    file_path: Path
    """The file; a relative path starts where the command is run."""
    id_key: str = "id"
    """Field that names an example; every value once."""
    structure: DatasetStructure = DatasetStructure()


Dataset = Annotated[
    Annotated[JsonDataset, Tag("json")]
    | Annotated[JsonDataset, Tag("jsonl")]
    | Annotated[JsonDataset, Tag("csv")]
    | _Custom,
    Discriminator(_type_of),
]


# Evaluators


class ExactMatch(Config):
    """1 when the output is the answer."""

    type: Literal["exact_match"] = Field(alias="_type")
    ignore_case: bool = False
    strip: bool = True
    """Whether white space at both ends is ignored."""


class Contains(Config):
    """1 when the output holds the answer."""

    type: Literal["contains"] = Field(alias="_type")
    ignore_case: bool = True


class Regex(Config):
    """1 when the pattern is found in the output; with a group, when the group is the answer."""

    type: Literal["regex"] = Field(alias="_type")
    pattern: str
    ignore_case: bool = False


class JsonSchema(Config):
    """1 when the output is JSON that fits the schema."""

    type: Literal["json_schema"] = Field(alias="_type")
    json_schema: dict[str, Any] = Field(alias="schema")


class PythonEvaluator(Config):
    """A function of the user's: `function(run)` gives a number, or a dict with `reward`."""

    type: Literal["python"] = Field(alias="_type")
    function: str
    """`module:callable`, sync or async."""
    args: dict[str, Any] = Field(default_factory=dict)
    """More keyword arguments of the function."""


class LlmJudge(Config):
    """Another LLM gives a score."""

    type: Literal["llm_judge"] = Field(alias="_type")
    llm: str
    """Name in `llms`."""
    instructions: str = "Score how well the answer solves the task."
    """What the judge is asked; it sees the task, the expected answer and the answer."""


class Ruler(Config):
    """A judge ranks all runs of an example against each other, as ART's RULER does."""

    type: Literal["ruler"] = Field(alias="_type")
    llm: str
    """Name in `llms`."""
    instructions: str = "Higher scores for attempts that come closer to the goal of the task."
    """The rubric."""


class IntermediateSteps(Config):
    """What the workflow gave itself with `llm.reward(...)` while it ran."""

    type: Literal["intermediate_steps"] = Field(alias="_type")
    aggregate: Literal["sum", "mean", "last", "discounted"] = "sum"
    discount: float = Field(0.9, gt=0, le=1)
    """With `discounted`: each earlier step counts this much less than the one after it."""


class WeightedSum(Config):
    """Several evaluators as one."""

    type: Literal["weighted_sum"] = Field(alias="_type")
    weights: dict[str, float] = Field(min_length=1)
    """Weight of each evaluator, by its name."""


Evaluator = Annotated[
    Annotated[ExactMatch, Tag("exact_match")]
    | Annotated[Contains, Tag("contains")]
    | Annotated[Regex, Tag("regex")]
    | Annotated[JsonSchema, Tag("json_schema")]
    | Annotated[PythonEvaluator, Tag("python")]
    | Annotated[LlmJudge, Tag("llm_judge")]
    | Annotated[Ruler, Tag("ruler")]
    | Annotated[IntermediateSteps, Tag("intermediate_steps")]
    | Annotated[WeightedSum, Tag("weighted_sum")]
    | _Custom,
    Discriminator(_type_of),
]


# The three components of the harness


class ArtTrajectoryBuilderConfig(Config):
    type: Literal["openpipe_art_traj_builder"] = Field(alias="_type")
    num_generations: int = Field(2, ge=1)
    """Trajectories per example: more give GRPO a better signal and cost more time."""
    examples_per_epoch: int | None = Field(None, ge=1)
    """Examples of an epoch, every one once before any comes again; None is the whole dataset."""


class InitArgs(Config):
    max_seq_length: int | None = Field(None, ge=16)
    """Longest sequence that is trained on."""


class EngineArgs(Config):
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    """Share of the GPU's memory for vLLM."""
    tensor_parallel_size: int | None = Field(None, ge=1)
    """GPUs that vLLM splits the model over."""


class PeftArgs(Config):
    r: int | None = Field(None, ge=1)
    """Rank of the LoRA; None is the server's."""
    lora_alpha: float | None = Field(None, gt=0)
    """Scale of the LoRA; None is the server's."""
    target_modules: list[str] | None = None
    """Linear layers that get a LoRA; None is the server's."""


class ArtBackendConfig(Config):
    """Where the backend is, and the run on it."""

    ip: str
    """Address of the backend."""
    port: int = Field(ge=1, le=65535)
    """Its control port."""
    name: str = "trainer_run"
    """Name of the model under training; a run of that name resumes at its newest step."""
    project: str = "trainer_project"
    """Project that the model belongs to."""
    base_model: str = "Qwen/Qwen2.5-7B-Instruct"
    """Base model; must be the server's."""
    api_key: pydantic.SecretStr = pydantic.SecretStr("default")
    """Sent as bearer token."""
    delete_old_checkpoints: bool = False
    """Delete old checkpoints before every training step, all but the newest."""
    init_args: InitArgs | None = None
    engine_args: EngineArgs | None = None
    peft_args: PeftArgs | None = None


class TrainingArgs(GrpoConfig):
    """Every setting of a GRPO step; `beta` is the guide's name of the KL coefficient."""

    beta: float = Field(0.0, ge=0)
    """Weight of the KL penalty."""

    @pydantic.model_validator(mode="after")
    def _one_name(self) -> "TrainingArgs":
        if {"beta", "kl_penalty_coef"} <= self.model_fields_set:
            raise ValueError("beta and kl_penalty_coef are the same setting: give one")
        return self

    def wire(self) -> dict[str, Any]:
        """What the user set, under the server's names."""
        given = self.model_dump(mode="json", exclude_unset=True)
        if "beta" in given:
            given["kl_penalty_coef"] = given.pop("beta")
        return {"learning_rate": self.learning_rate, **given}


class ArtTrainerAdapterConfig(Config):
    type: Literal["openpipe_art_trainer_adapter"] = Field(alias="_type")
    backend: ArtBackendConfig
    training: TrainingArgs = TrainingArgs()
    wait_for_backend: float = Field(120, ge=0)
    """Seconds to wait for a backend that went away; for one not there at first 5, unless given."""


class ArtTrainerConfig(Config):
    type: Literal["openpipe_art_trainer"] = Field(alias="_type")


TrajectoryBuilder = Annotated[
    Annotated[ArtTrajectoryBuilderConfig, Tag("openpipe_art_traj_builder")] | _Custom,
    Discriminator(_type_of),
]
TrainerAdapter = Annotated[
    Annotated[ArtTrainerAdapterConfig, Tag("openpipe_art_trainer_adapter")] | _Custom,
    Discriminator(_type_of),
]
Trainer = Annotated[
    Annotated[ArtTrainerConfig, Tag("openpipe_art_trainer")] | _Custom, Discriminator(_type_of)
]
