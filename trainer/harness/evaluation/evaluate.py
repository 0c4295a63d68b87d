"""`trainer eval`: runs a config's workflow with several models, and compares their rewards."""

import asyncio
import logging
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from rich.console import Console

from kit.errors import ConfigError
from kit.state_dir import EVALS, model_path
from kit.types import Json
from trainer.estimates import METHOD
from trainer.harness.config import FinetuneConfig
from trainer.harness.config_file import load_config, missing_parts
from trainer.harness.environments.environment import Environment
from trainer.harness.environments.load import opened
from trainer.harness.evaluation.models import (
    EvalModel,
    adapter_of,
    default_models,
    find_models,
    target_llm,
)
from trainer.harness.evaluation.results import Results
from trainer.harness.llm import Llms
from trainer.harness.load import load_runner, load_training, load_validation
from trainer.harness.progress import Progress, log_to
from trainer.harness.runner import attempt, record
from trainer.harness.types import Example, WorkflowRun
from trainer.harness.workflow_config import EnvironmentConfig
from trainer.measurements import Measurement, compared, measure

logger = logging.getLogger(__name__)
NAME = re.compile(r"\w[\w.-]*")


@dataclass(frozen=True)
class EvalOptions:
    """What the command line says beside the config."""

    models: Sequence[str] = ()
    """Models as `--model` names them; the base model and the newest step by default."""
    overrides: Sequence[tuple[str, str]] = ()
    validation_dataset: Path | None = None
    split: Literal["train", "eval"] | None = None
    """Which of an environment's examples to use."""
    num_examples: int | None = None
    """Use only the first examples."""
    num_generations: int = 1
    pass_at: Sequence[int] = ()
    success: float | None = None
    """A run with at least this reward passes. None: rewards are 0 or 1."""
    name: str | None = None
    """Name of the results; that of the dataset by default."""
    state_dir: Path = Path(".art")
    fresh: bool = False
    """Whether to forget earlier results of that name."""


@dataclass
class Evaluation:
    """The outcome: a measurement for each model, the first of which is compared with."""

    name: str
    path: Path
    options: EvalOptions
    examples: int
    measured: dict[str, Measurement] = field(default_factory=dict)

    def summary(self) -> Json:
        """The evaluation as data, for `--json` and the page."""
        ks, least = sorted(set(self.options.pass_at)), self.options.success
        passes = "reward is 1" if least is None else f"reward is at least {least:g}"
        return {
            "name": self.name,
            "file": str(self.path),
            "created": datetime.now(UTC).isoformat(),
            "interval_method": METHOD,
            "examples": self.examples,
            "num_generations": self.options.num_generations,
            "success": passes if ks else None,
            "success_reward": least,
            "models": compared(self.measured, ks, least),
        }


def evaluate(config_file: Path, options: EvalOptions, console: Console) -> Evaluation:
    """Call `evaluate_models` from code that is not async."""
    return asyncio.run(evaluate_models(config_file, options, console))


async def evaluate_models(
    config_file: Path, options: EvalOptions, console: Console | None = None
) -> Evaluation:
    """Run the config's examples with each model and measure the rewards."""
    console = console or Console(stderr=True)
    log_to(console, level=logging.WARNING)
    config = load_config(config_file, options.overrides)
    _check(config, options, str(config_file))
    async with opened(config.workflow) as environment:
        name, examples = _examples(config, environment, options)
        models = await find_models(config, options.models or default_models(config))
        path = _directory(config, options.state_dir) / EVALS / f"{options.name or name}.jsonl"
        results = Results(path, _settings(config), fresh=options.fresh)
        try:
            results.check(examples)
            evaluation = Evaluation(options.name or name, path, options, len(examples))
            runs = _Runs(config, environment, results, examples, options.num_generations)
            with Progress(console, of="models") as progress:
                progress.begin(len(models), 0)
                for model in models:
                    await runs.complete(model, progress)
                    rows = results.rows(model.label, examples, options.num_generations)
                    evaluation.measured[model.label] = measure(rows)
                    progress.one_done(evaluation.measured[model.label].mean, None)
            results.finish(evaluation.summary())
            return evaluation
        finally:
            results.close()


@dataclass(frozen=True)
class _Runs:
    """The runs of all models on the same examples."""

    config: FinetuneConfig
    environment: Environment | None
    results: Results
    examples: Sequence[Example]
    generations: int

    async def complete(self, model: EvalModel, progress: Progress) -> None:
        """Run the examples that have no result yet, and keep each as soon as it is scored."""
        left = [
            example
            for example in self.examples
            if not self.results.is_done(model.label, example, self.generations)
        ]
        progress.phase(model.label, self.generations * len(left))
        if not left:
            return
        judges = Llms(self.config.llms)
        llms = Llms({**self.config.llms, target_llm(self.config): model.llm})
        runner = load_runner(self.config, llms, self.environment, judges=judges)

        def keep(group: list[WorkflowRun]) -> None:
            self.results.add(model.label, group[0].example, map(record, group))

        try:
            await asyncio.gather(judges.probe(), llms.probe())
            llms.endpoints[target_llm(self.config)].ask_for_logprobs = False
            label = f"eval-{int(time.time())}"
            await attempt(runner, left, self.generations, label, progress.run_done, keep)
        finally:
            await asyncio.gather(judges.close(), llms.close())


def _check(config: FinetuneConfig, options: EvalOptions, source: str) -> None:
    """Raise for what cannot work, before anything is run."""
    missing = missing_parts(config, dataset=options.validation_dataset is None)
    if missing:
        raise ConfigError(
            f"`{source}` cannot be evaluated: " + "; ".join(missing),
            hint="An evaluation needs examples and a reward, as `trainer finetune` does",
        )
    if wrong := [k for k in options.pass_at if k > options.num_generations]:
        raise ConfigError(
            f"pass@{wrong[0]} needs at least {wrong[0]} runs of every example, and "
            f"`--num_generations` is {options.num_generations}",
            hint=f"Set `--num_generations {wrong[0]}` or more",
        )
    if options.success is not None and not math.isfinite(options.success):
        raise ConfigError("`--success` must be a finite number", hint="Write `--success 0.5`")
    if options.success is not None and not options.pass_at:
        raise ConfigError(
            "`--success` is not used without `--pass-at`", hint="Add `--pass-at 1`, or remove it"
        )
    if options.split and not isinstance(config.workflow, EnvironmentConfig):
        raise ConfigError(
            f"`--split {options.split}` is not used: only an environment has splits",
            hint="Name a file with `--validation_dataset`",
        )
    if options.name is not None and not NAME.fullmatch(options.name):
        raise ConfigError(
            f"`{options.name}` cannot name the results",
            hint="Use letters, digits, `.`, `_` and `-`",
        )


def _examples(
    config: FinetuneConfig, environment: Environment | None, options: EvalOptions
) -> tuple[str, Sequence[Example]]:
    """The examples to run, and the name of their results."""
    examples = None
    if options.split != "train":
        examples = load_validation(config, environment, options.validation_dataset)
        if examples is None and options.split == "eval":
            raise ConfigError(
                "The environment has no examples for validation",
                hint="Set `workflow.validation_examples`, for example with `-o`",
            )
    name = "eval" if environment else (options.validation_dataset or Path()).stem
    if examples is None:
        examples = load_training(config, environment)
        file = getattr(config.eval.general.dataset, "file_path", Path("train"))
        name = Path(file).stem
    return name, examples[: options.num_examples]


def _directory(config: FinetuneConfig, state_dir: Path) -> Path:
    """The run's directory if the server keeps it on this machine, else the output directory."""
    if adapter := adapter_of(config):
        run = model_path(state_dir, adapter.backend.project, adapter.backend.name)
        if run.is_dir():
            return run
    return config.finetuning.output_dir


def _settings(config: FinetuneConfig) -> Json:
    """What must stay the same for results to be compared, without keys and addresses."""
    trained = target_llm(config)
    return {
        "workflow": config.workflow.model_dump(mode="json"),
        "evaluators": {
            name: evaluator.model_dump(mode="json") for name, evaluator in config.evaluators.items()
        },
        "reward": config.reward_name,
        "sampling": config.llms[trained].sampling,
        "other_llms": {
            name: [llm.model_name, llm.sampling]
            for name, llm in config.llms.items()
            if name != trained
        },
    }
