"""The harness's data types: examples, runs, trajectories and training jobs.

Trajectories, training jobs and the three protocols use the names of NVIDIA's guide.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import pydantic

from kit.types import Json

# Running the workflow


@dataclass(frozen=True)
class Example:
    """One entry of a dataset."""

    id: str
    question: Any
    answer: Any
    row: Mapping[str, Any]
    """All fields of the entry."""


class Failure(StrEnum):
    """Why a run produced no trajectory."""

    WORKFLOW = "workflow_failed"
    TIMEOUT = "workflow_timed_out"
    EVALUATOR = "evaluator_failed"
    NO_LOGPROBS = "no_logprobs"
    NO_CALLS = "no_calls"
    OUT_OF_ORDER = "out_of_order"
    STALE = "stale"
    """More steps were trained since it was sampled than `max_steps_off_policy` allows."""


@dataclass
class Completion:
    """One call from the workflow to an LLM."""

    llm: str
    """The LLM's name in `llms`."""
    function: str | None
    """The part of the workflow that made the call, if it has a name."""
    messages: list[Json]
    choice: Json
    """The choice as in OpenAI's API, with logprobs."""
    tools: list[Json] | None = None
    policy_step: int | None = None
    created: float = 0.0
    recorded: bool = True
    """Whether the gateway's ledger has its tokens."""
    prompt_tokens: int = 0
    """Tokens of the prompt, if the endpoint counts them."""

    @property
    def text(self) -> str:
        return str((self.choice.get("message") or {}).get("content") or "")

    @property
    def has_logprobs(self) -> bool:
        return bool((self.choice.get("logprobs") or {}).get("content"))


@dataclass
class Outcome:
    """The result of a workflow whose evaluator needs more than the output."""

    output: Any
    state: Any
    """For the evaluator, as `run.state`."""


@dataclass
class WorkflowRun:
    """One run of the workflow on one example, as evaluators receive it."""

    example: Example
    generation: int
    group: int | None = None
    """The number of its group if groups are sampled ahead: then an example may have several."""
    models: dict[str, str] = field(default_factory=dict)
    """Names of models that it uses instead of those in the config, by LLM."""
    output: Any = None
    state: Any = None
    """Data of an environment about the run, for its own reward."""
    completions: list[Completion] = field(default_factory=list)
    step_rewards: list[float] = field(default_factory=list)
    """Rewards that the workflow reported with `llm.reward(...)`."""
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    """Why evaluators gave their scores, by the evaluator's name."""
    failure: Failure | None = None
    error: str = ""
    seconds: float = 0.0

    def fail(self, failure: Failure, error: str) -> None:
        """Mark the run as failed, and drop its reward."""
        self.failure, self.error, self.reward = failure, error, None


# Trajectories


class EpisodeItemRole(StrEnum):
    USER = "user"
    ASSISTANT = "assistant"
    SYSTEM = "system"
    FUNCTION = "function"
    TOOL = "tool"
    ENVIRONMENT = "environment"
    OTHER = "other"


class Stored(pydantic.BaseModel):
    """A model that reads back from a file as it was: a NaN does not become null."""

    model_config = pydantic.ConfigDict(ser_json_inf_nan="constants")


class EpisodeItem(Stored):
    """One message. An assistant message with logprobs was sampled by the policy."""

    role: EpisodeItemRole
    content: str
    logprobs: Any | None = None
    metadata: Json | None = None
    """`choice` or `message`: the original JSON of the item."""


class Trajectory(Stored):
    """One attempt at one example."""

    episode: list[EpisodeItem]
    reward: float
    shaped_rewards: list[float] | None = None
    additional_episodes: list[list[EpisodeItem]] = []
    """Conversations that do not continue the first: a second agent, or a rewritten history."""
    metadata: Json | None = None
    metrics: dict[str, float] = {}


class LostRun(pydantic.BaseModel):
    """A run that produced no trajectory."""

    example_id: str
    reason: str
    error: str = ""
    group: int | None = None
    """The number of its group if groups are sampled ahead."""


class TrajectoryCollection(Stored):
    """Trajectories of one epoch, grouped by example."""

    trajectories: list[list[Trajectory]]
    run_id: str
    lost: list[LostRun] = []
    """The epoch's other runs, which are counted and shown but not trained on."""

    @property
    def count(self) -> int:
        return sum(len(group) for group in self.trajectories)

    @property
    def rewards(self) -> list[list[float]]:
        return [[trajectory.reward for trajectory in group] for group in self.trajectories]


# Training jobs


class TrainingStatusEnum(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"


class TrainingJobRef(pydantic.BaseModel):
    """A submitted training job."""

    run_id: str
    backend: str
    metadata: Json | None = None


class TrainingJobStatus(pydantic.BaseModel):
    """The state of a training job."""

    run_id: str
    backend: str
    status: TrainingStatusEnum
    progress: float | None = None
    """Percentage, 0 to 100."""
    message: str | None = None
    metadata: Json | None = None


# The three components


class TrajectoryBuilder(Protocol):
    """Runs the workflow on the examples and returns scored trajectories in groups."""

    async def initialize(self, config: Any) -> None: ...
    async def start_run(self, run_id: str, meta: Json | None = None) -> None: ...
    async def finalize(self, run_id: str, meta: Json | None = None) -> TrajectoryCollection: ...


class TrainerAdapter(Protocol):
    """Submits trajectories to a training backend."""

    async def initialize(self, config: Any) -> None: ...
    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef: ...
    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus: ...
    async def wait_until_complete(
        self, ref: TrainingJobRef, poll_interval: float = 10.0
    ) -> TrainingJobStatus: ...
    async def cancel(self, ref: TrainingJobRef) -> None: ...


class Trainer(Protocol):
    """Runs the epochs."""

    async def initialize(self, config: Any) -> None: ...
    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | None: ...
    async def run(self, num_epochs: int) -> list[TrainingJobStatus]: ...
