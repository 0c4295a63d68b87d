"""The JSON of evaluations in the page's API, as types."""

from pydantic import BaseModel

from trainer.page.answers import Judgement, Numbers


class PassAt(BaseModel):
    k: int
    mean: float | None
    interval: tuple[float, float] | None
    examples: int


class Difference(BaseModel):
    """How a model differs from the first one on the examples that both have."""

    against: str
    examples: int
    difference: float | None
    interval: tuple[float, float] | None
    better: int
    worse: int
    clear: bool
    """Whether the interval excludes 0, or 6 or more examples all have the same difference."""


class EvalModel(BaseModel):
    model: str
    mean: float | None
    interval: tuple[float, float] | None
    examples: int
    runs: int
    lost: dict[str, int]
    """Runs without a reward, by reason."""
    pass_at: list[PassAt]
    metrics: dict[str, float]
    paired: Difference | None


class EvalAnswer(BaseModel):
    name: str
    file: str
    updated: float | None
    finished: bool
    """False while it goes on, or if it was interrupted."""
    examples: int
    num_generations: int
    interval_method: str
    success: str | None
    """From which reward on a run passes, in words."""
    models: list[EvalModel]
    missing: list[str]


class Evals(BaseModel):
    evals: list[EvalAnswer]


class EvalExample(BaseModel):
    example: str
    means: Numbers
    """The mean of each model, in the order of `models`."""
    difference: float | None
    """The last model minus the first."""


class EvalExamples(BaseModel):
    total: int
    models: list[str]
    rows: list[EvalExample]


class EvalAttempt(BaseModel):
    model: str
    example: str
    number: int
    reward: float | None
    parts: dict[str, float | None]
    lost: str | None
    """Why there is no reward."""
    error: str | None
    seconds: float | None
    output: str
    cut: int | None
    judge: list[Judgement]


class EvalAttempts(BaseModel):
    example: str
    total: int
    attempts: list[EvalAttempt]
