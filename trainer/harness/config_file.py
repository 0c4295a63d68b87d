"""Reads the config file of `trainer finetune`, and checks that its parts go together."""

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path

from kit.config import validate
from kit.errors import ConfigError, plural
from kit.yaml_files import read_yaml, shortened
from trainer.harness.components import ArtTrajectoryBuilderConfig, EnvironmentRewardConfig
from trainer.harness.config import FinetuneConfig
from trainer.harness.overrides import override
from trainer.harness.workflow_config import EnvironmentConfig


def load_config(path: Path, overrides: Sequence[tuple[str, str]] = ()) -> FinetuneConfig:
    """Read `path`, apply the overrides, and check that every component it names exists."""
    data, lines = read_yaml(path)
    for name, value in overrides:
        override(data, lines, name, value)
    config = validate(FinetuneConfig, data, source=str(path), lines=lines)
    _check_names(config, str(path))
    _check_sampling_ahead(config)
    return config


def _check_names(config: FinetuneConfig, source: str) -> None:
    """Raise one error that lists every name without a definition."""
    faults: list[str] = []

    def check(setting: str, name: str | None, known: Iterable[str]) -> None:
        names = list(known)
        if name is None or name in names:
            return
        near = difflib.get_close_matches(name, names, n=1)
        faults.append(
            f"`{setting}` names `{shortened(name)}`, which does not exist"
            + (f", did you mean `{near[0]}`?" if near else "")
        )

    finetuning = config.finetuning
    check("workflow.llm", getattr(config.workflow, "llm", None), config.llms)
    check("finetuning.trainer", finetuning.trainer, config.trainers)
    check("finetuning.trainer_adapter", finetuning.trainer_adapter, config.trainer_adapters)
    check(
        "finetuning.trajectory_builder", finetuning.trajectory_builder, config.trajectory_builders
    )
    check("finetuning.target_model", finetuning.target_model, config.llms)
    if finetuning.reward_function:
        name = finetuning.reward_function.name
        check("finetuning.reward_function.name", name, config.evaluators)
    for name, evaluator in config.evaluators.items():
        check(f"eval.evaluators.{name}.llm", getattr(evaluator, "llm", None), config.llms)
        for part in getattr(evaluator, "weights", {}):
            check(f"eval.evaluators.{name}.weights", part, config.evaluators)
    faults += _environment_faults(config)
    if finetuning.enabled:
        faults += [f"{fault} when finetuning is enabled" for fault in missing_parts(config)]
    if faults:
        raise ConfigError(
            f"`{source}` has {plural(len(faults), 'fault')}: " + "; ".join(faults),
            hint="Define the missing component, or correct the name",
        )


def _environment_faults(config: FinetuneConfig) -> list[str]:
    """Return a message for each setting that does not go with the kind of workflow."""
    kind = config.workflow.type
    if isinstance(config.workflow, EnvironmentConfig):
        unused = config.eval.general.dataset is not None
        return [f"`eval.general.dataset` is not used: `{kind}` brings its examples"] * unused
    return [
        f"`eval.evaluators.{name}` is `environment`, but the workflow is `{kind}`"
        for name, evaluator in config.evaluators.items()
        if isinstance(evaluator, EnvironmentRewardConfig)
    ]


def missing_parts(config: FinetuneConfig, *, dataset: bool = True) -> list[str]:
    """Return a message for each setting that runs with a reward need and the config lacks."""
    if isinstance(config.workflow, EnvironmentConfig):
        return []  # it brings both
    missing = []
    if dataset and config.eval.general.dataset is None:
        missing.append("`eval.general.dataset` is required")
    if not config.eval.evaluators:
        missing.append("`eval.evaluators` must define a reward")
    elif config.finetuning.reward_function is None and len(config.eval.evaluators) > 1:
        missing.append("`finetuning.reward_function` must name one of the evaluators")
    return missing


def _check_sampling_ahead(config: FinetuneConfig) -> None:
    """Raise if settings of sampling ahead do not go with the others."""
    finetuning = config.finetuning
    given = finetuning.model_fields_set
    if not finetuning.max_steps_off_policy:
        for name in ("groups_per_step", "oversample", "pin_runs"):
            if name in given:
                raise ConfigError(
                    f"`finetuning.{name}` is not used with `max_steps_off_policy: 0`",
                    hint="Set `finetuning.max_steps_off_policy: 1`, or remove the setting",
                )
        return
    if own := config.takes_turns_for:
        raise ConfigError(
            f"`finetuning.max_steps_off_policy` does not go with a {own} of your own",
            hint=f"Use the kit's own {own}, or set `max_steps_off_policy: 0`",
        )
    builder = config.trajectory_builders.get(finetuning.trajectory_builder or "")
    if (
        isinstance(builder, ArtTrajectoryBuilderConfig)
        and builder.examples_per_epoch is not None
        and finetuning.groups_per_step is not None
    ):
        raise ConfigError(
            "`finetuning.groups_per_step` and `examples_per_epoch` of the trajectory builder are "
            "both set",
            hint="With `max_steps_off_policy` an epoch is a step: remove one of them",
        )
