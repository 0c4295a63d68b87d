"""The context that every component of the harness receives in `initialize`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.harness.config import WHOLE_WORKFLOW, FinetuneConfig
from trainer.harness.progress import Progress
from trainer.harness.runner import Runner
from trainer.harness.types import Example, TrainerAdapter, TrajectoryBuilder


@dataclass
class Context:
    """The config, the examples and the components of one finetuning run."""

    config: FinetuneConfig
    runner: Runner
    examples: Sequence[Example]
    progress: Progress
    trajectory_builder: TrajectoryBuilder
    trainer_adapter: TrainerAdapter
    validation: Sequence[Example] | None = None
    validation_interval: int = 5
    resume: bool = False

    @property
    def output_dir(self) -> Path:
        return self.config.finetuning.output_dir

    @property
    def functions(self) -> list[str] | None:
        """Names of the workflow's parts to train on; None means the whole workflow."""
        names = self.config.finetuning.target_functions
        return None if WHOLE_WORKFLOW in names else names

    @property
    def target_llm(self) -> str | None:
        """Name of the LLM to train: `target_model`, else the workflow's, else the first one."""
        name = self.config.finetuning.target_model or getattr(self.config.workflow, "llm", None)
        return name or next(iter(self.config.llms), None)
