"""`trainer finetune`: trains a model as a config file describes."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from kit.errors import ConfigError
from trainer.errors import TrainingFailed
from trainer.harness import components as configs
from trainer.harness.config import FinetuneConfig
from trainer.harness.config_file import load_config
from trainer.harness.context import Context
from trainer.harness.environments.environment import Environment
from trainer.harness.environments.load import opened
from trainer.harness.epoch_rules import advice_on_turns
from trainer.harness.history import METRICS, PLOT, History
from trainer.harness.llm import Llms
from trainer.harness.load import load_runner, load_training, load_validation
from trainer.harness.off_policy import OffPolicyBuilder
from trainer.harness.progress import LOG, Progress, log_to
from trainer.harness.trainer import ARTTrainer
from trainer.harness.trainer_adapter import ARTTrainerAdapter
from trainer.harness.trajectory_builder import ARTTrajectoryBuilder
from trainer.harness.types import TrainingJobStatus, TrainingStatusEnum
from trainer.harness.user_code import create_component

logger = logging.getLogger(__name__)


@dataclass
class Result:
    """The outcome of a run."""

    config: FinetuneConfig
    statuses: list[TrainingJobStatus]
    history: History | None
    """None if the user's own trainer keeps no history."""


def finetune(config_file: Path, **options: Any) -> Result | None:
    """Call `train` from code that is not async."""
    return asyncio.run(train(config_file, **options))


async def train(
    config_file: Path,
    *,
    overrides: Sequence[tuple[str, str]] = (),
    validation_dataset: Path | None = None,
    validation_interval: int = 5,
    resume: bool = False,
    console: Console | None = None,
) -> Result | None:
    """Train as the config file describes; return None if it does not enable finetuning.

    In a notebook: `result = await train(Path("config.yaml"))`.
    """
    config = load_config(config_file, overrides)
    console = console or Console(stderr=True)
    log_to(console, config.finetuning.output_dir if config.finetuning.enabled else None)
    if not config.finetuning.enabled:
        logger.info("Finetuning is not enabled in %s: nothing to do", config_file)
        return None
    llms = Llms(config.llms)
    async with opened(config.workflow) as environment:
        context = make_context(config, llms, Progress(console), environment)
        context.resume = resume
        context.validation = load_validation(config, environment, validation_dataset)
        context.validation_interval = validation_interval
        return await _run(config, context, llms)


async def _run(config: FinetuneConfig, context: Context, llms: Llms) -> Result:
    trainer = _component(config.trainers, config.finetuning.trainer, ARTTrainer)
    try:
        await trainer.initialize(context)
        await llms.probe()
        _check_pins(context, llms)
        with context.progress:
            statuses = await trainer.run(config.finetuning.num_epochs)
    finally:
        for part in (context.trajectory_builder, context.trainer_adapter):
            for name in ("cancel", "close"):
                # A builder's `cancel` stops everything. A TrainerAdapter's stops one job.
                if hasattr(part, name) and not (name == "cancel" and hasattr(part, "submit")):
                    await getattr(part, name)()
        await llms.close()
        if hasattr(trainer, "close"):
            trainer.close()
    for status in statuses:
        if status.status == TrainingStatusEnum.FAILED:
            hint = str((status.metadata or {}).get("hint") or TrainingFailed.hint)
            raise TrainingFailed(f"Training failed: {status.message}", hint=hint)
    return Result(config, statuses, getattr(trainer, "history", None))


def _check_pins(context: Context, llms: Llms) -> None:
    """Raise if runs are to sample from one step, and their endpoint knows no steps."""
    name = context.target_llm or ""
    if context.config.finetuning.pin_runs and not llms.endpoints[name].records:
        raise ConfigError(
            f"`finetuning.pin_runs` needs `trainer serve` behind the LLM `{name}`",
            hint="Use the server's own address as its `base_url`, or remove the setting",
        )


def make_context(
    config: FinetuneConfig, llms: Llms, progress: Progress, environment: Environment | None
) -> Context:
    finetuning = config.finetuning
    return Context(
        config=config,
        runner=load_runner(config, llms, environment, judges=llms),
        examples=load_training(config, environment),
        progress=progress,
        trajectory_builder=_component(
            config.trajectory_builders,
            finetuning.trajectory_builder,
            OffPolicyBuilder if finetuning.max_steps_off_policy else ARTTrajectoryBuilder,
        ),
        trainer_adapter=_component(
            config.trainer_adapters, finetuning.trainer_adapter, ARTTrainerAdapter
        ),
    )


def _component(configured: dict[str, Any], name: str | None, ours: Any) -> Any:
    """Create the component `name`: one of ours, or the user's."""
    assert name is not None
    config = configured[name]
    return create_component(config) if isinstance(config, configs.CustomConfig) else ours(config)


def summary(result: Result) -> dict[str, Any]:
    """Return the result as data: the histories, and the status of each epoch of this call."""
    history = result.history
    return {
        "run_id": history.run_id if history else None,
        "epochs": history.epoch if history else len(result.statuses),
        "output_dir": str(result.config.finetuning.output_dir),
        "rewards": history.rewards if history else [],
        "validation": history.validation if history else [],
        "statuses": [status.model_dump(mode="json") for status in result.statuses],
    }


def closing_lines(result: Result) -> list[str]:
    """Return the lines to print at the end: rewards before and after, and the files."""
    history = result.history
    if history is None:
        return []
    lines = []
    measured = [row for row in history.validation if row.get("avg_reward") is not None]
    if len(measured) > 1:
        first, last = measured[0], measured[-1]
        gain = last["avg_reward"] - first["avg_reward"]
        lines.append(
            f"Validation reward: {first['avg_reward']:.3f} before, "
            f"{last['avg_reward']:.3f} after ({gain:+.3f})"
        )
        for name in sorted(first["metrics"].keys() & last["metrics"].keys()):
            lines.append(
                f"Validation {name}: {first['metrics'][name]:.3f} before, "
                f"{last['metrics'][name]:.3f} after"
            )
    rewards = [row["avg_reward"] for row in history.rewards if row["avg_reward"] is not None]
    if rewards:
        lines.append(f"Training reward: {rewards[0]:.3f} first epoch, {rewards[-1]:.3f} last epoch")
    config = result.config
    if not (config.finetuning.max_steps_off_policy or config.takes_turns_for):
        lines += advice_on_turns(history.metrics)
    lines.append(f"Metrics: {history.directory / METRICS}")
    lines.append(f"Plot: {history.directory / PLOT}")
    lines.append(f"Log: {history.directory / LOG}")
    return lines
