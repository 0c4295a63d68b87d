"""What every component of the harness gets at its start."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.harness.config import WHOLE_WORKFLOW, FinetuneConfig
from trainer.harness.progress import Progress
from trainer.harness.runner import Runner
from trainer.harness.types import Example, TrainerAdapter, TrajectoryBuilder


@dataclass
class Context:
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
        """The named parts whose calls are trained on; None is the whole workflow."""
        named = self.config.finetuning.target_functions
        return None if WHOLE_WORKFLOW in named else named

    @property
    def target_llm(self) -> str | None:
        """The LLM whose calls are trained on: the one that the workflow is given."""
        named = self.config.finetuning.target_model or getattr(self.config.workflow, "llm", None)
        return named or next(iter(self.config.llms), None)
