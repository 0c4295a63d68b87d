"""Builds what a config describes: the runner of its workflow, and its examples."""

from collections.abc import Sequence
from pathlib import Path

from kit.errors import ConfigError
from trainer.harness.components import FileDatasetConfig
from trainer.harness.config import FinetuneConfig
from trainer.harness.dataset import load_examples
from trainer.harness.environments.environment import Environment
from trainer.harness.evaluators import Scorer, load_evaluators
from trainer.harness.llm import Llms, Workflow
from trainer.harness.runner import Runner
from trainer.harness.types import Example
from trainer.harness.workflow import load_workflow
from trainer.harness.workflow_config import EnvironmentConfig


def load_runner(
    config: FinetuneConfig, llms: Llms, environment: Environment | None, *, judges: Llms
) -> Runner:
    """Build the runner. The workflow calls `llms`, and evaluators that ask an LLM call `judges`."""
    general = config.eval.general
    evaluators = load_evaluators(config.evaluators, judges, environment=environment)
    workflow: Workflow
    if environment is not None:
        workflow = environment.run
    else:
        assert not isinstance(config.workflow, EnvironmentConfig)
        workflow = load_workflow(config.workflow)
    return Runner(
        workflow,
        llms,
        Scorer(evaluators, config.reward_name, general.run_timeout),
        llm=getattr(config.workflow, "llm", None),
        max_concurrency=general.max_concurrency,
        run_timeout=general.run_timeout,
        stop_on_failure=general.on_failure == "stop",
    )


def load_training(config: FinetuneConfig, environment: Environment | None) -> list[Example]:
    """Return the examples to train on."""
    if environment is not None:
        return environment.examples("train")
    dataset = config.eval.general.dataset
    assert dataset is not None  # checked with the config
    return load_examples(dataset)


def load_validation(
    config: FinetuneConfig, environment: Environment | None, file: Path | None
) -> Sequence[Example] | None:
    """Return the examples to validate on: those of the file, or the environment's own."""
    if environment is None:
        if file is None:
            return None
        dataset = config.eval.general.dataset
        return load_examples(dataset or FileDatasetConfig(_type="json", file_path=file), file)
    if file is not None:
        raise ConfigError(
            "`--validation_dataset` is not used: the environment brings its examples",
            hint="Set `workflow.validation_examples` instead",
        )
    assert isinstance(config.workflow, EnvironmentConfig)
    return environment.examples("eval") if config.workflow.validation_examples else None
