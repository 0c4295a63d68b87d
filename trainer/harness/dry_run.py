"""`trainer dry-run`: one group of one example, every check, and what the whole run will cost.

It samples with the server that the config names and trains nothing. The runner, the evaluators and
the episodes are those of `trainer finetune`; the problems are those that `trainer doctor` finds.
"""

import asyncio
import logging
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from kit.errors import ConfigError, plural
from kit.gpus import STEP_OVERHEAD_S, Card, find_card, sampling_seconds, training_seconds
from kit.model_shape import read_shape
from kit.types import Json
from trainer.doctor import findings_of
from trainer.harness import episodes
from trainer.harness.components import ArtTrajectoryBuilderConfig
from trainer.harness.config import FinetuneConfig
from trainer.harness.config_file import load_config
from trainer.harness.context import Context
from trainer.harness.environments.load import opened
from trainer.harness.evaluation.models import adapter_of
from trainer.harness.finetune import make_context
from trainer.harness.llm import Llms
from trainer.harness.progress import Progress, log_to
from trainer.harness.runner import attempt, failures
from trainer.harness.trainer_adapter import ARTTrainerAdapter
from trainer.harness.types import Completion, WorkflowRun


@dataclass(frozen=True)
class Check:
    """One thing that a run needs in order to learn."""

    name: str
    ok: bool
    message: str
    hint: str = ""


@dataclass(frozen=True)
class DryRun:
    """The checks, and the estimate of what the config's run will take."""

    checks: list[Check]
    estimate: Json

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)


def dry_run(
    config_file: Path,
    overrides: Sequence[tuple[str, str]],
    gpu: str | None,
    price: float | None,
    console: Console,
) -> DryRun:
    """Call `try_config` from code that is not async."""
    return asyncio.run(try_config(config_file, overrides, gpu, price, console))


async def try_config(
    config_file: Path,
    overrides: Sequence[tuple[str, str]] = (),
    gpu: str | None = None,
    price: float | None = None,
    console: Console | None = None,
) -> DryRun:
    """Run one example as often as an epoch does, check the runs, and estimate the whole run."""
    console = console or Console(stderr=True)
    log_to(console, level=logging.ERROR)
    config = load_config(config_file, overrides)
    card = find_card(gpu) if gpu else None
    builder = config.trajectory_builders.get(config.finetuning.trajectory_builder or "")
    if not config.finetuning.enabled or not isinstance(builder, ArtTrajectoryBuilderConfig):
        raise ConfigError(
            f"`{config_file}` describes no run that can be tried: it needs `finetuning.enabled: "
            "true` and a trajectory builder of the type `openpipe_art_traj_builder`",
            hint="`trainer eval` runs a workflow without training settings",
        )
    if price is not None and card is None:
        raise ConfigError(
            "`--price` is not used without `--gpu`", hint="Add the card, such as `--gpu H100`"
        )
    llms = Llms(config.llms)
    async with opened(config.workflow) as environment:
        context = make_context(config, llms, Progress(console, of="dry run"), environment)
        try:
            if isinstance(context.trainer_adapter, ARTTrainerAdapter):
                await context.trainer_adapter.initialize(context)  # the server then has the model
            await llms.probe()
            runs, seconds = await _one_group(context, builder.num_generations)
        finally:
            if isinstance(context.trainer_adapter, ARTTrainerAdapter):
                await context.trainer_adapter.close()
            await llms.close()
    calls = [_trained_calls(context, run) for run in runs]
    per_epoch = (
        config.finetuning.groups_per_step or builder.examples_per_epoch or len(context.examples)
    )
    return DryRun(
        checks=check_runs(config, runs, calls),
        estimate=estimate(config, calls, seconds, per_epoch * len(runs), card, price),
    )


async def _one_group(context: Context, generations: int) -> tuple[list[WorkflowRun], float]:
    started = time.monotonic()
    with context.progress as progress:
        progress.begin(1, 0)
        progress.phase("sampling", generations)
        label = f"dry-run-{int(time.time())}"
        examples = context.examples[:1]
        runs = await attempt(context.runner, examples, generations, label, progress.run_done)
    return runs, time.monotonic() - started


def _trained_calls(context: Context, run: WorkflowRun) -> list[Completion]:
    calls = episodes.select_completions(run.completions, context.functions, context.target_llm)
    if run.failure is None:
        episodes.build(run, calls)  # fails the run for the reasons that an epoch would
    return calls


def check_runs(
    config: FinetuneConfig, runs: Sequence[WorkflowRun], calls: Sequence[Sequence[Completion]]
) -> list[Check]:
    """Check the runs of one group, and what `trainer doctor` would say of a step made of them."""
    checks = [_runs_check(runs), _tools_check(calls)]
    rewards = [run.reward for run in runs if run.reward is not None]
    if rewards:
        span = f"{min(rewards):.3g} to {max(rewards):.3g}"
        text = (
            f"{plural(len(rewards), 'finite reward')}, {span}, mean {statistics.fmean(rewards):.3g}"
        )
        checks.append(Check("reward", True, text))
    row = _as_step(config, runs, calls)
    problems = findings_of([row], config.reward_name) if rewards else []
    checks += [Check("doctor", False, finding.problem, finding.hint) for finding in problems]
    if not problems and rewards:
        text = "rewards differ, logprobs are there, and every conversation fits"
        checks.append(Check("doctor", True, text))
    return checks


def _runs_check(runs: Sequence[WorkflowRun]) -> Check:
    lost = failures(episodes.lost([runs]))
    if not lost:
        return Check("runs", True, f"{plural(len(runs), 'run')} of one example ended")
    first = next(run for run in runs if run.failure is not None)
    reasons = ", ".join(f"{count} {reason}" for reason, count in lost.items())
    return Check(
        "runs",
        False,
        f"{sum(lost.values())} of {plural(len(runs), 'run')} were lost ({reasons}): {first.error}",
        "Fix the first error; lost runs are not trained on",
    )


def _tools_check(calls: Sequence[Sequence[Completion]]) -> Check:
    offered = {
        tool["function"]["name"]
        for one in calls
        for completion in one
        for tool in completion.tools or []
        if isinstance(tool.get("function"), dict)
    }
    if not offered:
        return Check("tools", True, "the workflow offers the model no tools")
    called = sum(
        len((completion.choice.get("message") or {}).get("tool_calls") or [])
        for one in calls
        for completion in one
    )
    names = ", ".join(sorted(offered))
    if called:
        return Check("tools", True, f"{plural(called, 'call')} of the tools {names}")
    return Check(
        "tools",
        False,
        f"No run called one of the tools {names}",
        "Show a call in the prompt, require one with `tool_choice`, or use a larger model",
    )


def _as_step(
    config: FinetuneConfig, runs: Sequence[WorkflowRun], calls: Sequence[Sequence[Completion]]
) -> Json:
    """The group as the metrics of a step, which is what `trainer doctor` reads."""
    rewards = {run.reward for run in runs if run.reward is not None}
    flat = [completion for one in calls for completion in one]
    limit = _longest(config)
    row: Json = {
        "data/step_num_trajectories": len(runs),
        "data/step_num_groups_submitted": 1,
        "data/dropped_equal_rewards": len(rewards) < 2,
        "data/choices_without_logprobs": sum(not call.has_logprobs for call in flat),
        "data/step_num_truncated": sum(
            call.choice.get("finish_reason") == "length" for call in flat
        ),
        "data/dropped_too_long": sum(
            limit is not None and max(map(_length, one), default=0) > limit for one in calls
        ),
    }
    if adapter := adapter_of(config):
        row["loss/learning_rate"] = adapter.training.learning_rate
    return row


def _longest(config: FinetuneConfig) -> int | None:
    """The longest sequence that is trained on, if the config says it."""
    adapter = adapter_of(config)
    if adapter is None:
        return None
    model = adapter.backend.init_args
    given = (
        model.max_seq_length if model else None,
        adapter.training.max_seq_length,
        adapter.training.packed_sequence_length,
    )
    return min((limit for limit in given if limit is not None), default=None)


def _sampled(completion: Completion) -> int:
    return len((completion.choice.get("logprobs") or {}).get("content") or [])


def _length(completion: Completion) -> int:
    return completion.prompt_tokens + _sampled(completion)


def estimate(
    config: FinetuneConfig,
    calls: Sequence[Sequence[Completion]],
    seconds: float,
    runs_per_epoch: int,
    card: Card | None,
    price: float | None,
) -> Json:
    """What an epoch and the whole run take: tokens, minutes and dollars.

    Without a card the minutes are those that sampling takes on the server as it is now.
    """
    epochs, times = config.finetuning.num_epochs, runs_per_epoch / max(len(calls), 1)
    sampled = round(times * sum(_sampled(call) for one in calls for call in one))
    read = round(times * sum(call.prompt_tokens for one in calls for call in one))
    longest = max((_length(call) for one in calls for call in one), default=0)
    if card is None:
        epoch_s, where = times * seconds, "sampling alone, on this server"
    else:
        adapter = adapter_of(config)
        shape = read_shape(adapter.backend.base_model if adapter else "")
        at_once = min(config.eval.general.max_concurrency, runs_per_epoch)
        epoch_s = (
            sampling_seconds(shape, card, tokens=sampled, at_once=at_once)
            + training_seconds(shape, card, tokens=sampled + read)
            + STEP_OVERHEAD_S
        )
        where = f"one {card.name}, estimated from its speed; without the time to rent and install"
    dollars = None if price is None else epoch_s / 3600 * price
    return {
        "where": where,
        "runs_per_epoch": runs_per_epoch,
        "epochs": epochs,
        "longest_conversation_tokens": longest,
        "epoch": _total(sampled, read, epoch_s, dollars, 1),
        "run": _total(sampled, read, epoch_s, dollars, epochs),
    }


def _total(sampled: int, read: int, seconds: float, dollars: float | None, epochs: int) -> Json:
    return {
        "sampled_tokens": sampled * epochs,
        "prompt_tokens": read * epochs,
        "minutes": round(seconds * epochs / 60, 2),
        "dollars": None if dollars is None else round(dollars * epochs, 4),
    }
