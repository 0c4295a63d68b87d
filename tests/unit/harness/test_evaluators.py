"""Evaluators return the documented scores, and an error in one loses a run, not the epoch."""

import asyncio
import math
import sys
from types import ModuleType
from typing import Any

import pydantic
import pytest

from kit.errors import ConfigError
from trainer.errors import BadScore
from trainer.harness import components as configs
from trainer.harness import evaluators as module
from trainer.harness.evaluators import EachRun, Scorer, WeightedSum, load_evaluators
from trainer.harness.llm import Llms
from trainer.harness.scorers import math_verify
from trainer.harness.types import Example, Failure, WorkflowRun


def run(output: Any, answer: Any = "Paris", steps: list[float] | None = None) -> WorkflowRun:
    example = Example("e", "The capital of France?", answer, {})
    return WorkflowRun(example, 0, output=output, step_rewards=steps or [])


async def score(config: dict[str, Any], *runs: WorkflowRun) -> list[float | None]:
    parsed = {name: evaluator(part) for name, part in config.items()}
    last = list(config)[-1]
    await Scorer(load_evaluators(parsed, Llms({})), last).score(runs)
    return [run.reward for run in runs]


def evaluator(config: dict[str, Any]) -> Any:
    return pydantic.TypeAdapter(configs.EvaluatorConfig).validate_python(config)


@pytest.mark.parametrize(
    ("config", "output", "expected"),
    [
        ({"_type": "exact_match"}, " Paris\n", 1.0),
        ({"_type": "exact_match"}, "paris", 0.0),
        ({"_type": "exact_match", "ignore_case": True}, "paris", 1.0),
        ({"_type": "exact_match", "strip": False}, "Paris ", 0.0),
        ({"_type": "contains"}, "It is PARIS, I think", 1.0),
        ({"_type": "contains", "ignore_case": False}, "It is PARIS", 0.0),
        ({"_type": "regex", "pattern": r"^\w+$"}, "Paris", 1.0),
        ({"_type": "regex", "pattern": r"^\w+$"}, "It is Paris", 0.0),
        ({"_type": "regex", "pattern": r"answer: (\w+)"}, "the answer: Paris", 1.0),
        ({"_type": "regex", "pattern": r"answer: (\w+)"}, "the answer: Rome", 0.0),
        ({"_type": "json_schema", "schema": {"required": ["city"]}}, '{"city": "Paris"}', 1.0),
        ({"_type": "json_schema", "schema": {"required": ["city"]}}, '{"town": 1}', 0.0),
        ({"_type": "json_schema", "schema": {"required": ["city"]}}, "no JSON", 0.0),
        ({"_type": "json_schema", "schema": {"required": ["city"]}}, "[" * 9999, 0.0),
        ({"_type": "json_schema", "schema": {"required": ["city"]}}, {"city": 1}, 1.0),
    ],
)
async def test_a_text_evaluator_scores_the_output(
    config: dict[str, Any], output: Any, expected: float
) -> None:
    assert await score({"reward": config}, run(output)) == [expected]


@pytest.mark.parametrize("answer", [None, "", " \n"])
@pytest.mark.parametrize("output", ["", "None", "$None$ is it"])
@pytest.mark.parametrize(
    "config",
    [
        {"_type": "exact_match"},
        {"_type": "exact_match", "strip": False},
        {"_type": "contains"},
        {"_type": "regex", "pattern": "(.*)"},
        {"_type": "regex", "pattern": "answer: (.*)"},
    ],
)
async def test_an_example_without_an_answer_has_no_score_from_a_comparison(
    config: dict[str, Any], output: str, answer: Any
) -> None:
    one = run(output, answer)
    assert await score({"reward": config}, one) == [None]
    assert one.failure is Failure.EVALUATOR and "Example `e` has no answer" in one.error


async def test_a_pattern_without_a_group_and_a_falsy_answer_are_compared_as_before() -> None:
    assert await score({"r": {"_type": "regex", "pattern": "^P"}}, run("Paris", None)) == [1.0]
    assert await score({"r": {"_type": "exact_match"}}, run("0", 0)) == [1.0]
    assert await score({"r": {"_type": "contains"}}, run("It is false", False)) == [1.0]


def test_math_verify_has_no_score_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", ModuleType("math_verify"))
    compare = math_verify(configs.MathVerifyConfig(_type="math_verify"))
    with pytest.raises(BadScore, match="Example `e` has no answer, which the evaluator `math_ver"):
        compare(run("None", None))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 7.0),
        ({"aggregate": "mean"}, 7 / 3),
        ({"aggregate": "last"}, 4.0),
        ({"aggregate": "discounted", "discount": 0.5}, 1 / 4 + 2 / 2 + 4),
    ],
)
async def test_rewards_of_intermediate_steps_are_aggregated(
    settings: dict[str, Any], expected: float
) -> None:
    config = {"reward": {"_type": "intermediate_steps", **settings}}
    assert await score(config, run("", steps=[1.0, 2.0, 4.0])) == [pytest.approx(expected)]
    assert await score(config, run("")) == [0.0]


async def test_a_weighted_sum_keeps_its_parts_as_metrics() -> None:
    config = {
        "right": {"_type": "contains"},
        "short": {"_type": "regex", "pattern": "^.{1,8}$"},
        "reward": {"_type": "weighted_sum", "weights": {"right": 0.75, "short": 0.25}},
    }
    runs = run("Paris"), run("It must be Paris"), run("Rome")
    assert await score(config, *runs) == [1.0, 0.75, 0.25]
    assert runs[1].metrics == {"right": 1.0, "short": 0.0}


async def test_evaluators_other_than_the_reward_are_metrics() -> None:
    one = run("Paris")
    await score({"short": {"_type": "regex", "pattern": "^.$"}, "r": {"_type": "contains"}}, one)
    assert one.reward == 1.0 and one.metrics == {"short": 0.0}


def raises(_: WorkflowRun) -> float:
    raise ZeroDivisionError("by zero")


async def asynchronous(run: WorkflowRun, factor: float = 1.0) -> float:
    return len(run.output) * factor


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (raises, "raised ZeroDivisionError: by zero"),
        (lambda run: math.nan, "returned `nan`"),
        (lambda run: math.inf, "returned `inf`"),
        (lambda run: "good", "returned `'good'`"),
        (lambda run: None, "returned `None`"),
        (lambda run: {"accuracy": 1.0}, "returned `None`"),
    ],
)
async def test_a_bad_score_loses_the_run_and_is_quoted(function: Any, expected: str) -> None:
    one = run("Paris")
    await Scorer({"mine": EachRun(function, {})}, "mine").score([one])
    assert one.failure is Failure.EVALUATOR and one.reward is None
    assert one.error.startswith("Evaluator `mine` on example `e` ") and expected in one.error


async def test_a_function_may_be_async_take_arguments_and_return_metrics() -> None:
    one, two = run("ab"), run("abc")
    await Scorer({"mine": EachRun(asynchronous, {"factor": 0.5})}, "mine").score([one, two])
    assert [one.reward, two.reward] == [1.0, 1.5]
    await Scorer({"mine": EachRun(lambda r: {"reward": True, "length": 2}, {})}, "mine").score(
        [one]
    )
    assert one.reward == 1.0 and one.metrics == {"length": 2.0}


async def test_one_bad_run_does_not_lose_the_others_of_its_group() -> None:
    good, bad = run("Paris"), run("x")
    function = lambda r: 1 / (r.output == "Paris")  # noqa: E731
    await Scorer({"mine": EachRun(function, {})}, "mine").score([good, bad])
    assert good.reward == 1.0 and bad.failure is Failure.EVALUATOR


@pytest.mark.parametrize(
    "config",
    [{"_type": "regex", "pattern": "("}, {"_type": "json_schema", "schema": {"type": "nope"}}],
)
def test_an_invalid_pattern_or_schema_is_rejected_when_loaded(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        module.load_evaluators({"reward": evaluator(config)}, Llms({}))


async def test_an_evaluator_that_raises_stop_iteration_loses_the_run() -> None:
    def bare_next(run: WorkflowRun) -> float:
        return float(next(iter(())))

    one = run("Paris")
    await Scorer({"reward": EachRun(bare_next, {})}, "reward").score([one])
    assert one.failure is Failure.EVALUATOR and "StopIteration" in (one.error or "")


async def test_too_few_scores_or_arrays_lose_the_runs() -> None:
    class Few:
        async def score(self, runs: Any) -> list[Any]:
            return [1.0]

    class Arrays:
        def item(self) -> float:
            raise ValueError("can only convert an array of size 1")

    runs = [run("a"), run("b")]
    await Scorer({"reward": Few()}, "reward").score(runs)
    assert [one.failure for one in runs] == [Failure.EVALUATOR] * 2
    assert "1 scores for 2 runs" in (runs[0].error or "")
    one = run("a")
    await Scorer({"reward": EachRun(lambda run: Arrays(), {})}, "reward").score([one])
    assert one.failure is Failure.EVALUATOR


async def test_a_part_of_a_weighted_sum_may_be_the_reward() -> None:
    parsed = {
        "a": evaluator({"_type": "exact_match"}),
        "sum": evaluator({"_type": "weighted_sum", "weights": {"a": 0.5}}),
    }
    one = run("Paris")
    await Scorer(load_evaluators(parsed, Llms({})), "a").score([one])
    assert (one.reward, one.metrics["sum"]) == (1.0, 0.5)


class Moody:
    """Gives a lower score each time that it is called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, run: WorkflowRun) -> Any:
        self.calls += 1
        return {"reward": 1 / self.calls, "reason": f"call {self.calls}"}


@pytest.mark.parametrize("reward", ["mood", "first", "second"])
async def test_an_evaluator_that_is_used_several_times_scores_each_run_once(
    reward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    moody = Moody()
    monkeypatch.setattr(sys.modules[__name__], "moody", moody, raising=False)
    config = {
        "mood": {"_type": "python", "function": f"{__name__}:moody"},
        "first": {"_type": "weighted_sum", "weights": {"mood": 0.5}},
        "second": {"_type": "weighted_sum", "weights": {"mood": 2.0}},
    }
    parsed = {name: evaluator(part) for name, part in config.items()}
    one = run("Paris")
    await Scorer(load_evaluators(parsed, Llms({})), reward).score([one])
    assert moody.calls == 1
    scores = {"mood": 1.0, "first": 0.5, "second": 2.0}
    assert {**one.metrics, reward: one.reward} == scores
    assert one.reasons == {"mood": "call 1"}


async def test_parts_of_sums_are_scored_at_the_same_time() -> None:
    here = asyncio.Barrier(2)

    async def meet(run: WorkflowRun) -> float:
        await here.wait()
        return 1.0

    parts = {"a": EachRun(meet, {}), "b": EachRun(meet, {})}
    one = run("Paris")
    total = WeightedSum({"a": 0.5, "b": 0.25})
    await Scorer({**parts, "sum": total}, "sum", 60).score([one])
    assert one.reward == 0.75, one.error


async def test_texts_of_an_evaluator_are_reasons_and_what_is_left_out_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = {
        **{"reward": 1.0, "reason": "half \ud83d of a pair", "note": "x" * 5000},
        **{"length": 2, "absent": None, "tags": ["a"]},
    }
    runs = [run("a"), run("b")]
    mine = EachRun(lambda run: given, {})
    total = WeightedSum({"part": 0.5})
    await Scorer({"mine": mine, "part": mine, "sum": total}, "sum").score(runs)
    one = runs[0]
    assert one.reward == 0.5 and one.metrics == {"mine": 1.0, "part": 1.0, "length": 2.0}
    assert set(one.reasons) == {"mine", "mine/note", "part", "part/note"}
    assert one.reasons["mine"] == one.reasons["part"] == "half ? of a pair"
    assert len(one.reasons["part/note"]) < 2010
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 2 and all("returns `tags`, which is left out" in it for it in warnings)
