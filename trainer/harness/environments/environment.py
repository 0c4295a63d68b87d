"""`Environment`: the workflow, the dataset and the evaluator of a config in one."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from kit.errors import ConfigError
from trainer.harness.llm import Llm
from trainer.harness.types import Example, Outcome, WorkflowRun

Split = Literal["train", "eval"]


class Environment(Protocol):
    """One environment, for all runs of a training."""

    def examples(self, split: Split) -> list[Example]:
        """Return the examples to train on, or those to validate on."""

    async def run(self, example: Example, llm: Llm) -> Outcome:
        """Run the agent on one example. This is the workflow."""

    async def score(self, runs: Sequence[WorkflowRun]) -> list[Any]:
        """Return the reward and metrics of each run. This is the evaluator."""

    async def close(self) -> None: ...


def hold_out(examples: list[Example], count: int, split: Split, name: str) -> list[Example]:
    """Divide examples that have no split of their own: the last `count` are for validation."""
    if count >= len(examples):
        raise ConfigError(
            f"`{name}` has `{len(examples)}` examples, and `{count}` are held out for validation",
            hint="Lower `workflow.validation_examples`",
        )
    at = len(examples) - count
    return examples[:at] if split == "train" else examples[at:]
