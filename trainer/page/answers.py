"""The JSON of the page's API, as types. Every number is finite or null."""

from typing import Any, Literal

from pydantic import BaseModel

from trainer.page.audit import Level
from trainer.page.overview import State

Numbers = list[float | None]


class RunSummary(BaseModel):
    project: str
    name: str
    base_model: str | None
    step: int
    updated: float | None
    """Seconds since 1970, as every time in this API."""
    reward: float | None
    live: bool
    """Whether the server that answers has the run loaded."""


class Lease(BaseModel):
    ends_at: float | None
    idle_minutes: float | None
    dollars_per_hour: float | None
    dollars_so_far: float | None
    dollars_left: float | None


class Server(BaseModel):
    version: str
    live: bool
    """False for `trainer view`, which only reads files."""
    lease: Lease | None


class RunList(BaseModel):
    runs: list[RunSummary]
    server: Server


class RunAbout(BaseModel):
    project: str
    name: str
    base_model: str | None
    created: float | None
    updated: float | None


class FindingAnswer(BaseModel):
    problem: str
    hint: str


class Verdict(BaseModel):
    state: State
    sentences: list[str]
    findings: list[FindingAnswer]
    step: int
    seconds_per_step: float | None
    seconds_left: float | None
    steps_planned: int | None


class Overview(BaseModel):
    run: RunAbout
    verdict: Verdict
    missing: list[str]
    config: dict[str, Any]
    columns: list[str]


class Series(BaseModel):
    step: list[int]
    series: dict[str, Numbers]
    reduced: bool
    """Whether steps were merged into ranges, with `NAME:min` and `NAME:max` beside each mean."""


class Steps(BaseModel):
    step: list[int]
    reward: Numbers
    trainable: Numbers
    groups: Numbers
    attempts: Numbers
    kept: list[bool]
    """Whether the attempts of the step are on disk."""
    splits: list[list[str]]
    """Other splits, such as `val`, whose attempts are on disk."""
    seconds: Numbers


class GroupAnswer(BaseModel):
    id: int
    example: str | None
    n: int
    mean: float | None
    spread: float | None
    min: float | None
    max: float | None
    trainable: bool
    dropped: str | None
    preview: str


class StepAnswer(BaseModel):
    step: int
    split: str
    groups: list[GroupAnswer]
    settings: dict[str, Any]
    metrics: dict[str, float | None]


class Message(BaseModel):
    role: str
    content: str
    trained: bool = False
    """Whether the policy wrote the message."""
    cut: int | None = None
    """Characters that are left out at the end."""
    name: str | None = None
    tool_calls: list[Any] = []
    tool_call_id: str | None = None
    reasoning: str | None = None


class Conversation(BaseModel):
    messages: list[Message]
    tools: list[Any] = []


class Judgement(BaseModel):
    name: str
    reason: str


class AttemptAnswer(BaseModel):
    id: int
    group: int
    number: int
    example: str | None
    reward: float | None
    advantage: float | None
    parts: dict[str, float | None]
    metadata: dict[str, Any]
    logs: list[str]
    turns: int
    tokens: int
    finish: str | None
    error: str | None
    conversations: list[Conversation]
    judge: list[Judgement]


class GroupAttempts(BaseModel):
    group: GroupAnswer
    attempts: list[AttemptAnswer]


class Tokens(BaseModel):
    total: int
    id: list[int]
    text: list[str | None]
    mask: list[int]
    logprob: Numbers
    learner: Numbers
    advantage: Numbers
    weight: Numbers
    sequence: list[int]
    policy_step: list[int | None]


class ExampleRow(BaseModel):
    example: str
    n: int
    mean: float | None
    spread: float | None
    trend: float | None
    steps: list[int]
    means: list[float]


class Examples(BaseModel):
    total: int
    rows: list[ExampleRow]


class SignAnswer(BaseModel):
    name: str
    level: Level
    sentence: str
    series: str | None


class Audit(BaseModel):
    note: str
    signs: list[SignAnswer]


class Side(BaseModel):
    run: str
    step: int
    label: str
    examples: int
    mean: float | None


class Pair(BaseModel):
    example: str
    a: float
    b: float
    difference: float


class Comparison(BaseModel):
    a: Side
    b: Side
    split: str
    paired: list[Pair]
    mean_difference: float | None
    interval: tuple[float, float] | None
    """None for a single example, or if the difference is the same on all of them."""
    clear: bool
    """Whether the interval excludes 0, or 6 or more examples all have the same difference."""
    n: int


class CheckpointAnswer(BaseModel):
    step: int
    sha256: str | None
    parent: int | None
    size: int | None
    served: bool
    created: float | None
    verified: None
    """Reserved: files are not hashed for the page."""


class Log(BaseModel):
    lines: list[str]


class LoginToken(BaseModel):
    token: str
    seconds: int


Order = Literal["spread", "mean", "trend", "example"]
