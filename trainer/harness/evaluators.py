"""Evaluators: each gives every run a score.

An evaluator receives all runs of one example together, so it can also compare them.
"""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from kit import json_text
from kit.errors import ConfigError, NotInstalled
from trainer.errors import BadScore
from trainer.harness import components as configs
from trainer.harness.judges import LlmJudge, Ruler
from trainer.harness.llm import Llms
from trainer.harness.scorers import inspect_scorer, math_verify
from trainer.harness.scores import Score, expected_answer, parse_score
from trainer.harness.types import Failure, WorkflowRun
from trainer.harness.user_code import call, create_component, import_object, within


class Evaluator(Protocol):
    """Scores all runs of one example."""

    async def score(self, runs: Sequence[WorkflowRun]) -> list[Any]:
        """Return for each run a number, a dict, or an exception.

        A dict holds `reward`, other numbers, which become metrics, and a text as `reason`.
        """


class EachRun:
    """Scores each run separately with the user's function, sync or async."""

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        self._function = function
        self._arguments = arguments

    async def score(self, runs: Sequence[WorkflowRun]) -> list[Any]:
        calls = (call(self._function, run, **self._arguments) for run in runs)
        return list(await asyncio.gather(*calls, return_exceptions=True))


class FastFunction:
    """Scores each run separately with one of our functions, fast enough for the event loop."""

    def __init__(self, function: Callable[[WorkflowRun], float]) -> None:
        self._function = function

    async def score(self, runs: Sequence[WorkflowRun]) -> list[Any]:
        return [self._score(run) for run in runs]

    def _score(self, run: WorkflowRun) -> Any:
        try:
            return self._function(run)
        except Exception as error:  # an output that cannot be printed loses its own run only
            return error


class WeightedSum:
    """Adds up the weighted scores of other evaluators, and keeps each score as a metric."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.weights = weights

    def combine(self, scores: Mapping[str, Score | BadScore]) -> Score | BadScore:
        """Combine the scores that the evaluators gave one run."""
        parts: dict[str, Score] = {}
        for name in self.weights:
            part = scores[name]
            if isinstance(part, BadScore):
                return part
            parts[name] = part
        total = Score(sum(self.weights[name] * part.reward for name, part in parts.items()))
        for part in parts.values():
            total.metrics |= part.metrics
            total.reasons |= part.reasons
        total.metrics |= {name: part.reward for name, part in parts.items()}
        return total


class Scorer:
    """All evaluators of a config: one gives the reward, the others give metrics."""

    def __init__(
        self,
        evaluators: Mapping[str, Evaluator | WeightedSum],
        reward: str,
        timeout: float | None = None,
    ) -> None:
        """`timeout`: seconds for one evaluator on the runs of one example."""
        self._evaluators: dict[str, Evaluator] = {}
        self._sums: dict[str, WeightedSum] = {}
        for name, evaluator in evaluators.items():
            if isinstance(evaluator, WeightedSum):
                self._sums[name] = evaluator
            else:
                self._evaluators[name] = evaluator
        summed = {part for total in self._sums.values() for part in total.weights}
        self._parts = [name for name in self._evaluators if name in summed]
        self._reward = reward
        self._timeout = timeout

    async def score(self, runs: Sequence[WorkflowRun]) -> None:
        """Set the reward and metrics of all runs of one example. A run without a score fails.

        Every evaluator scores the runs once, however many sums it is part of: a judge costs money,
        and its next verdict may be another one.
        """
        runs = [run for run in runs if run.failure is None]
        if not runs:
            return
        scores = {
            name: await self._scores(name, runs)
            for name in self._evaluators
            if name not in self._parts
        }
        parts = await asyncio.gather(*(self._scores(name, runs) for name in self._parts))
        scores |= zip(self._parts, parts, strict=True)
        for number, run in enumerate(runs):
            found = {name: by_run[number] for name, by_run in scores.items()}
            found |= {name: total.combine(found) for name, total in self._sums.items()}
            for name, score in found.items():
                if name not in self._parts or name == self._reward:  # a sum has those of its parts
                    self._record(run, name, score)

    async def _scores(self, name: str, runs: Sequence[WorkflowRun]) -> list[Score | BadScore]:
        """Return what one evaluator gives each run."""
        try:
            scores = await within(self._timeout, self._evaluators[name].score(runs))
            if len(scores) != len(runs):
                raise BadScore(
                    f"Evaluator `{name}` returned {len(scores)} scores for {len(runs)} runs"
                )
        except Exception as error:  # an error in the user's code loses runs, not the training
            scores = [error] * len(runs)
        parsed: list[Score | BadScore] = []
        for run, score in zip(runs, scores, strict=True):
            try:
                parsed.append(parse_score(score, name, run))
            except BadScore as error:
                parsed.append(error)
        return parsed

    def _record(self, run: WorkflowRun, name: str, score: Score | BadScore) -> None:
        if run.failure is not None:
            return
        if isinstance(score, BadScore):
            run.fail(Failure.EVALUATOR, score.message)
            return
        run.metrics.update(score.metrics)
        run.reasons.update(score.reasons)
        if name == self._reward:
            run.reward = score.reward
        else:
            run.metrics[name] = score.reward


def load_evaluators(
    configured: Mapping[str, Any], llms: Llms, *, environment: Evaluator | None = None
) -> dict[str, Evaluator | WeightedSum]:
    """Create the evaluators of a config."""
    created = {
        name: _create(config, llms, environment)
        for name, config in configured.items()
        if not isinstance(config, configs.WeightedSumConfig)
    }
    sums: dict[str, WeightedSum] = {}
    for name, config in configured.items():
        if isinstance(config, configs.WeightedSumConfig):
            if nested := [part for part in config.weights if part not in created]:
                raise ConfigError(
                    f"`eval.evaluators.{name}` includes `{nested[0]}`, which is a weighted sum too",
                    hint=f"Weight the parts of `{nested[0]}` directly",
                )
            sums[name] = WeightedSum(config.weights)
    return {**created, **sums}


def _create(config: Any, llms: Llms, environment: Evaluator | None) -> Evaluator:
    match config:
        case configs.CustomConfig():
            evaluator: Evaluator = create_component(config)
            return evaluator
        case configs.PythonEvaluatorConfig():
            return EachRun(import_object(config.function), config.args)
        case configs.ExactMatchConfig():
            return FastFunction(lambda run: float(_output(run, config) == _answer(run, config)))
        case configs.ContainsConfig():
            return FastFunction(lambda run: float(_answer(run, config) in _output(run, config)))
        case configs.RegexConfig():
            return FastFunction(_regex(config))
        case configs.JsonSchemaConfig():
            return FastFunction(_json_schema(config))
        case configs.IntermediateStepsConfig():
            return FastFunction(lambda run: _aggregate(run.step_rewards, config))
        case configs.LlmJudgeConfig():
            return LlmJudge(llms, config)
        case configs.RulerConfig():
            return Ruler(llms, config)
        case configs.EnvironmentRewardConfig():
            assert environment is not None  # checked with the config
            return environment
        case configs.MathVerifyConfig():
            return EachRun(math_verify(config), {})
        case configs.InspectScorerConfig():
            return EachRun(inspect_scorer(config), {})
    raise AssertionError(config)


def _output(run: WorkflowRun, config: configs.ExactMatchConfig | configs.ContainsConfig) -> str:
    return _normalize(run.output, config)


def _answer(run: WorkflowRun, config: configs.ExactMatchConfig | configs.ContainsConfig) -> str:
    return _normalize(expected_answer(run, config.type), config)


def _normalize(value: Any, config: configs.ExactMatchConfig | configs.ContainsConfig) -> str:
    text = "" if value is None else str(value)
    if getattr(config, "strip", True):
        text = text.strip()
    return text.casefold() if config.ignore_case else text


def _regex(config: configs.RegexConfig) -> Callable[[WorkflowRun], float]:
    try:
        pattern = re.compile(config.pattern, re.IGNORECASE if config.ignore_case else 0)
    except re.error as exc:
        raise ConfigError(
            f"`{config.pattern}` is not a regular expression: {exc}", hint="Fix `pattern`"
        ) from exc

    def score(run: WorkflowRun) -> float:
        match = pattern.search(str(run.output))
        if not pattern.groups:
            return float(match is not None)
        answer = expected_answer(run, config.type)
        return float(match is not None and (match[1] or "").strip() == answer.strip())

    return score


def _json_schema(config: configs.JsonSchemaConfig) -> Callable[[WorkflowRun], float]:
    try:
        import jsonschema
    except ImportError:
        raise NotInstalled(
            "The evaluator `json_schema` needs `jsonschema`, which is not installed",
            hint="Install it with `pip install jsonschema`",
        ) from None
    validator = jsonschema.validators.validator_for(config.json_schema)
    try:
        validator.check_schema(config.json_schema)
    except jsonschema.SchemaError as exc:
        raise ConfigError(
            f"`schema` is not a JSON schema: {exc.message}", hint="Fix `schema`"
        ) from exc
    check = validator(config.json_schema)

    def score(run: WorkflowRun) -> float:
        value = run.output
        if isinstance(value, str):
            try:
                value = json_text.parse(value)
            except ValueError:
                return 0.0
        return float(check.is_valid(value))

    return score


def _aggregate(rewards: Sequence[float], config: configs.IntermediateStepsConfig) -> float:
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
