"""What travels through the harness: examples, runs, trajectories and training jobs.

The names of the last two are those of NVIDIA's guide, so that components written for it read alike.
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
    """The whole entry."""


class Failure(StrEnum):
    """Why a run gave no trajectory."""

    WORKFLOW = "workflow_failed"
    TIMEOUT = "workflow_timed_out"
    EVALUATOR = "evaluator_failed"
    NO_LOGPROBS = "no_logprobs"
    NO_CALLS = "no_calls"
    OUT_OF_ORDER = "out_of_order"


@dataclass
class Completion:
    """One call of an LLM by the workflow."""

    llm: str
    """Name in `llms`."""
    function: str | None
    """The named part of the workflow that made the call."""
    messages: list[Json]
    choice: Json
    """OpenAI's choice, with logprobs."""
    tools: list[Json] | None = None
    policy_step: int | None = None
    created: float = 0.0
    recorded: bool = True
    """Whether the gateway's ledger holds its tokens."""

    @property
    def text(self) -> str:
        return str((self.choice.get("message") or {}).get("content") or "")

    @property
    def has_logprobs(self) -> bool:
        return bool((self.choice.get("logprobs") or {}).get("content"))


@dataclass
class WorkflowRun:
    """The workflow ran once on one example; what an evaluator sees."""

    example: Example
    generation: int
    output: Any = None
    completions: list[Completion] = field(default_factory=list)
    step_rewards: list[float] = field(default_factory=list)
    """What the workflow gave itself with `llm.reward(...)`."""
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    failure: Failure | None = None
    error: str = ""
    seconds: float = 0.0

    def fail(self, failure: Failure, error: str) -> None:
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


class EpisodeItem(pydantic.BaseModel):
    """One message of an episode; an assistant's with logprobs was sampled by the policy."""

    role: EpisodeItemRole
    content: str
    logprobs: Any | None = None
    metadata: Json | None = None
    """`choice` or `message`: the item as it was on the wire."""


class Trajectory(pydantic.BaseModel):
    """One attempt at one example."""

    episode: list[EpisodeItem]
    reward: float
    shaped_rewards: list[float] | None = None
    additional_episodes: list[list[EpisodeItem]] = []
    """Conversations that do not continue the first one: a second agent, a rewritten history."""
    metadata: Json | None = None
    metrics: dict[str, float] = {}


class TrajectoryCollection(pydantic.BaseModel):
    """Trajectories of one epoch, grouped by example."""

    trajectories: list[list[Trajectory]]
    run_id: str

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
    """Where a training job stands."""

    run_id: str
    backend: str
    status: TrainingStatusEnum
    progress: float | None = None
    """Percent, 0 to 100."""
    message: str | None = None
    metadata: Json | None = None


# The three components


class TrajectoryBuilder(Protocol):
    """Runs the workflow on the examples and gives back scored, grouped trajectories."""

    async def initialize(self, config: Any) -> None: ...
    async def start_run(self, run_id: str, meta: Json | None = None) -> None: ...
    async def finalize(self, run_id: str, meta: Json | None = None) -> TrajectoryCollection: ...


class TrainerAdapter(Protocol):
    """Takes trajectories to a training backend."""

    async def initialize(self, config: Any) -> None: ...
    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef: ...
    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus: ...
    async def wait_until_complete(
        self, ref: TrainingJobRef, poll_interval: float = 10.0
    ) -> TrainingJobStatus: ...
    async def cancel(self, ref: TrainingJobRef) -> None: ...


class Trainer(Protocol):
    """The loop over epochs."""

    async def initialize(self, config: Any) -> None: ...
    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | None: ...
    async def run(self, num_epochs: int) -> list[TrainingJobStatus]: ...
