"""Evaluators: a number for every run. They score all runs of one example together, so that one
that ranks them against each other is no special case.
"""

import asyncio
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from kit.errors import ConfigError, NotInstalled
from trainer.errors import BadScore
from trainer.harness import components as configs
from trainer.harness.judges import LlmJudge, Ruler
from trainer.harness.llm import Llms
from trainer.harness.types import Failure, WorkflowRun
from trainer.harness.user_code import call, instance, load


class Evaluator(Protocol):
    async def score(self, runs: Sequence[WorkflowRun]) -> list[Any]:
        """A number, or a dict with `reward` and other numbers, for each run; or an exception."""


class EachRun:
    """Scores every run by itself, with a function that may be sync or async."""

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        self._function = function
        self._arguments = arguments

    async def score(self, runs: Sequence[WorkflowRun]) -> list[Any]:
        calls = (call(self._function, run, **self._arguments) for run in runs)
        return list(await asyncio.gather(*calls, return_exceptions=True))


class Plain:
    """Scores every run by itself, with a quick function of ours."""

    def __init__(self, function: Callable[[WorkflowRun], float]) -> None:
        self._function = function

    async def score(self, runs: Sequence[WorkflowRun]) -> list[Any]:
        return [self._function(run) for run in runs]


class WeightedSum:
    """Several evaluators as one; their own scores are kept as metrics."""

    def __init__(self, parts: Mapping[str, Evaluator], weights: Mapping[str, float]) -> None:
        self._parts = parts
        self._weights = weights

    async def score(self, runs: Sequence[WorkflowRun]) -> list[Any]:
        names = list(self._weights)
        scored = await asyncio.gather(*(self._parts[name].score(runs) for name in names))
        result: list[Any] = []
        for run, scores in zip(runs, zip(*scored, strict=True), strict=True):
            try:
                found = {
                    name: number(score, name, run)
                    for name, score in zip(names, scores, strict=True)
                }
            except BadScore as error:
                result.append(error)
                continue
            more = {key: value for _, metrics in found.values() for key, value in metrics.items()}
            numbers = {name: value for name, (value, _) in found.items()}
            total = sum(self._weights[name] * value for name, value in numbers.items())
            result.append({**more, **numbers, "reward": total})
        return result


def number(score: Any, name: str, run: WorkflowRun) -> tuple[float, dict[str, float]]:
    """An evaluator's score and its other metrics, or `BadScore` that says what it gave."""
    where = f"Evaluator `{name}`, example `{run.example.id}`:"
    if isinstance(score, BadScore):
        raise score
    if isinstance(score, BaseException):
        raise BadScore(f"{where} it raised {type(score).__name__}: {score}") from score
    metrics: dict[str, float] = {}
    if isinstance(score, Mapping):
        metrics = {
            str(key): float(value)
            for key, value in score.items()
            if key != "reward" and _is_number(value)
        }
        score = score.get("reward")
    if not _is_number(score):
        raise BadScore(f"{where} it gave `{score!r:.60}`, not a finite number")
    return float(score), metrics


def _is_number(value: Any) -> bool:
    # numpy's and torch's scalars have `item`; a bool counts as 0 or 1.
    try:
        value = value.item() if hasattr(value, "item") else value
    except (TypeError, ValueError, RuntimeError):  # an array of several
        return False
    return isinstance(value, int | float) and math.isfinite(value)


class Scorer:
    """All evaluators of a config: one gives the reward, the others metrics."""

    def __init__(self, evaluators: Mapping[str, Evaluator], reward: str) -> None:
        self._evaluators = evaluators
        self._reward = reward

    async def score(self, runs: Sequence[WorkflowRun]) -> None:
        """Set reward and metrics of every run of one example; a run that cannot be scored fails."""
        runs = [run for run in runs if run.failure is None]
        if not runs:
            return
        for name, evaluator in self._evaluators.items():
            try:
                scores = await evaluator.score(runs)
                if len(scores) != len(runs):
                    raise BadScore(f"it gave {len(scores)} scores for {len(runs)} runs")
            except Exception as error:  # the user's code: its fault is a lost run, not the end
                scores = [error] * len(runs)
            for run, score in zip(runs, scores, strict=True):
                self._take(run, name, score)

    def _take(self, run: WorkflowRun, name: str, score: Any) -> None:
        if run.failure is not None:
            return
        try:
            value, metrics = number(score, name, run)
        except BadScore as error:
            run.fail(Failure.EVALUATOR, error.message)
            return
        run.metrics.update(metrics)
        if name == self._reward:
            run.reward = value
        else:
            run.metrics[name] = value


def load_evaluators(
    wanted: Mapping[str, Any], llms: Llms, *, reward: str | None = None
) -> dict[str, Evaluator]:
    """Build what the config names; a weighted sum gets its parts. `reward` stays in any case."""
    made: dict[str, Evaluator] = {
        name: _make(config, llms)
        for name, config in wanted.items()
        if not isinstance(config, configs.WeightedSum)
    }
    for name, config in wanted.items():
        if isinstance(config, configs.WeightedSum):
            if absent := [part for part in config.weights if part not in made]:
                raise ConfigError(
                    f"`eval.evaluators.{name}` weighs `{absent[0]}`, a weighted sum itself",
                    hint="Give the weights of its parts here",
                )
            parts = {part: made[part] for part in config.weights}
            made[name] = WeightedSum(parts, config.weights)
    summed = {
        part
        for config in wanted.values()
        if isinstance(config, configs.WeightedSum)
        for part in config.weights
    }
    # Parts of a sum are scored, and kept as metrics, by the sum.
    return {name: it for name, it in made.items() if name not in summed or name == reward}


def _make(config: Any, llms: Llms) -> Evaluator:
    match config:
        case configs.CustomConfig():
            made: Evaluator = instance(config)
            return made
        case configs.PythonEvaluator():
            return EachRun(load(config.function), config.args)
        case configs.ExactMatch():
            return Plain(lambda run: float(_text(run, config) == _answer(run, config)))
        case configs.Contains():
            return Plain(lambda run: float(_answer(run, config) in _text(run, config)))
        case configs.Regex():
            return Plain(_regex(config))
        case configs.JsonSchema():
            return Plain(_json_schema(config))
        case configs.IntermediateSteps():
            return Plain(lambda run: _aggregate(run.step_rewards, config))
        case configs.LlmJudge():
            return LlmJudge(llms, config)
        case configs.Ruler():
            return Ruler(llms, config)
    raise AssertionError(config)


def _text(run: WorkflowRun, config: configs.ExactMatch | configs.Contains) -> str:
    return _normal(run.output, config)


def _answer(run: WorkflowRun, config: configs.ExactMatch | configs.Contains) -> str:
    return _normal(run.example.answer, config)


def _normal(value: Any, config: configs.ExactMatch | configs.Contains) -> str:
    text = "" if value is None else str(value)
    if getattr(config, "strip", True):
        text = text.strip()
    return text.casefold() if config.ignore_case else text


def _regex(config: configs.Regex) -> Callable[[WorkflowRun], float]:
    try:
        pattern = re.compile(config.pattern, re.IGNORECASE if config.ignore_case else 0)
    except re.error as exc:
        raise ConfigError(
            f"`{config.pattern}` is not a regular expression: {exc}", hint="Mend `pattern`"
        ) from exc

    def score(run: WorkflowRun) -> float:
        found = pattern.search(str(run.output))
        if not found or not pattern.groups:
            return float(found is not None)
        return float((found[1] or "").strip() == str(run.example.answer).strip())

    return score


def _json_schema(config: configs.JsonSchema) -> Callable[[WorkflowRun], float]:
    try:
        import jsonschema
    except ImportError:
        raise NotInstalled(
            "The evaluator `json_schema` needs `jsonschema`, not installed here",
            hint="Install it with `pip install jsonschema`",
        ) from None
    validator = jsonschema.validators.validator_for(config.json_schema)
    try:
        validator.check_schema(config.json_schema)
    except jsonschema.SchemaError as exc:
        raise ConfigError(f"`schema` is not a JSON schema: {exc.message}", hint="Mend it") from exc
    check = validator(config.json_schema)

    def score(run: WorkflowRun) -> float:
        value = run.output
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                return 0.0
        return float(check.is_valid(value))

    return score


def _aggregate(rewards: Sequence[float], config: configs.IntermediateSteps) -> float:
    if not rewards:
        return 0.0
    match config.aggregate:
        case "sum":
            return sum(rewards)
        case "mean":
            return sum(rewards) / len(rewards)
        case "last":
            return rewards[-1]
    total = 0.0
    for reward in rewards:
        total = total * config.discount + reward
    return total
