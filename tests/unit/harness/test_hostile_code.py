"""The user's code may do anything, but it loses its own run only, and never in silence."""

import asyncio
import io
import json
import logging
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kit.errors import ConfigError
from trainer.errors import NothingToTrainOn
from trainer.harness import episodes, user_code
from trainer.harness.components import CustomConfig
from trainer.harness.dataset import load_examples
from trainer.harness.epoch_rules import check_for_runs
from trainer.harness.evaluators import EachRun, Evaluator, Scorer, load_evaluators
from trainer.harness.llm import Llms
from trainer.harness.metrics import write_jsonl
from trainer.harness.progress import ConsoleLines
from trainer.harness.runner import Runner, commonest_failure, record
from trainer.harness.types import Example, Failure, WorkflowRun
from trainer.harness.user_code import create_component, import_object
from trainer.harness.watchdog import LoopBlocked, users_code, watch

pytestmark = pytest.mark.filterwarnings("ignore:coroutine")


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise KeyError("no text")


class Stop(BaseException):
    """Neither `Exception` nor one that asyncio knows."""


def endless() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def throws(error: BaseException) -> Callable[..., Any]:
    def function(*_: Any) -> Any:
        raise error

    return function


def throws_later(error: BaseException) -> Callable[..., Any]:
    async def function(*_: Any) -> Any:
        await asyncio.sleep(0)
        raise error

    return function


def returns(value: Any) -> Callable[..., Any]:
    return lambda *_: value


RAISED = [
    GeneratorExit(),
    KeyboardInterrupt("mine"),
    SystemExit(3),
    Stop("mine"),
    StopIteration(1),
    asyncio.CancelledError(),
    UnprintableError(),
    RuntimeError("half \ud83d of a pair"),
    RecursionError(),
    MemoryError(),
]
RETURNED = [
    10**400,
    {"reward": 10**400},
    {"reward": 1.0, "other": 10**400, Unprintable(): 2},
    {"reward": Unprintable()},
    Unprintable(),
    float("nan"),
    "1.0",
    "\ud83d",
    endless(),
    type("Odd", (), {"item": property(lambda self: 1 / 0)})(),
    type("Odd", (dict,), {"get": throws(Stop())})(),
    1e300,
]


def run(output: Any = "") -> WorkflowRun:
    return WorkflowRun(Example("e", "q", "a", {}), 0, output=output)


@pytest.mark.parametrize("function", [*map(throws, RAISED), *map(throws_later, RAISED)])
async def test_an_evaluator_may_raise_anything(function: Callable[..., Any]) -> None:
    one, two = run(), run()
    await Scorer({"mine": EachRun(function, {})}, "mine").score([one, two])
    assert one.failure == two.failure == Failure.EVALUATOR
    assert "Evaluator `mine` on example `e` raised" in one.error
    one.error.encode()


@pytest.mark.parametrize("value", RETURNED, ids=range(len(RETURNED)))
async def test_an_evaluator_may_return_anything(value: Any) -> None:
    one = run()
    await Scorer({"mine": EachRun(returns(value), {})}, "mine").score([one])
    if isinstance(value, dict) and "other" in value:
        assert one.reward == 1.0 and "other" not in one.metrics
    else:
        assert one.failure == Failure.EVALUATOR and one.reward is None
        assert "Evaluator `mine` on example `e`" in one.error and len(one.error) < 400
        one.error.encode()


@pytest.mark.parametrize("kind", ["exact_match", "contains", "regex"])
async def test_our_evaluators_take_any_output(kind: str) -> None:
    from tests.unit.harness.test_evaluators import evaluator

    bad, good = run(Unprintable()), run("a")
    config = {"_type": kind, **({"pattern": "a"} if kind == "regex" else {})}
    await Scorer(load_evaluators({"r": evaluator(config)}, Llms({})), "r").score([bad, good])
    assert bad.failure == Failure.EVALUATOR and good.reward == 1.0


class Hanging:
    """An evaluator that is never done, and does not care that it is cancelled."""

    async def score(self, runs: Any) -> Any:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                await asyncio.sleep(0.5)
                return []


@pytest.mark.parametrize(
    "evaluator",
    [
        EachRun(lambda run: time.sleep(1), {}),
        EachRun(lambda run: asyncio.sleep(60), {}),
        Hanging(),
    ],
)
async def test_an_evaluator_that_hangs_loses_its_runs(
    evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_code, "GRACE", 0.05)
    one = run()
    async with asyncio.timeout(10):
        await Scorer({"mine": evaluator}, "mine", timeout=0.05).score([one])
    assert one.failure == Failure.EVALUATOR and "it took longer than 0.05 s" in one.error


# Workflows


def runner(workflow: Any, timeout: float = 20) -> Runner:
    async def start(example: Example, llm: Any) -> Any:
        return await user_code.call(workflow, example, llm)

    llms: Any = Llms({})
    llms.endpoints = {"m": None}
    llms.handle = lambda *_: None
    llms.step_rewards = lambda _: []

    async def completions(_: Any) -> list[Any]:
        return []

    llms.completions = completions
    scorer = Scorer({"r": EachRun(lambda run: 1.0, {})}, "r")
    return Runner(
        *(start, llms, scorer),
        llm="m",
        max_concurrency=4,
        run_timeout=timeout,
        stop_on_failure=False,
    )


async def runs_of(workflow: Any, timeout: float = 20) -> list[WorkflowRun]:
    examples = [Example(name, "q", "a", {}) for name in ("bad", "good")]
    async with asyncio.timeout(30):
        groups = await runner(workflow, timeout).run(examples, 1, "label", lambda run: None)
    return [run for group in groups for run in group]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("later", [False, True])
async def test_a_workflow_that_raises_anything_loses_its_own_run(
    error: BaseException, later: bool
) -> None:
    function = (throws_later if later else throws)(error)

    async def workflow(example: Example, llm: Any) -> Any:
        return await user_code.call(function) if example.id == "bad" else "done"

    bad, good = await runs_of(workflow)
    assert bad.failure == Failure.WORKFLOW and bad.error
    bad.error.encode()
    assert good.reward == 1.0


def blocks_in_python() -> None:
    while True:
        pass


def blocks_in_a_pattern() -> None:
    re.match(r"(a+)+$", "a" * 40 + "b")


@pytest.mark.parametrize("block", [blocks_in_python, blocks_in_a_pattern, lambda: time.sleep(60)])
async def test_an_async_workflow_that_blocks_the_loop_is_interrupted(
    block: Callable[[], None],
) -> None:
    async def workflow(example: Example, llm: Any) -> Any:
        if example.id == "bad":
            block()
        return "done"

    before = signal.getsignal(signal.SIGALRM)
    began = time.monotonic()
    bad, _ = await runs_of(workflow, timeout=0.5)
    assert bad.failure == Failure.TIMEOUT and time.monotonic() - began < 20
    assert signal.getsignal(signal.SIGALRM) is before


# Records and logs


@pytest.mark.parametrize(
    "output", [Unprintable(), endless(), {"a": Unprintable()}, [10**5000], "\ud83d", {(1, 2): {3}}]
)
def test_any_output_is_recorded_as_json(output: Any, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "runs.jsonl", [record(run(output)), record(run("good"))])
    rows = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == ["e", "e"] and rows[1]["output"] == "good"


@pytest.mark.parametrize("value", [Unprintable(), "half \ud83d of a pair"])
def test_any_message_is_printed(value: Any) -> None:
    text = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    handler = ConsoleLines(Console(file=text))
    handler.emit(logging.LogRecord("n", logging.INFO, "", 0, "lost: %s", (value,), None))
    text.seek(0)
    assert text.read().startswith("INFO - ")


def test_when_every_run_is_lost_the_error_names_the_commonest_reason() -> None:
    runs = [[run(), run(), run()]]
    for each, text in zip(runs[0], ("once", "twice", "twice"), strict=True):
        each.fail(Failure.WORKFLOW, text)
    assert commonest_failure(episodes.lost(runs)) == "twice"
    row = {"failures": {"workflow_failed": 3}, "commonest_failure": "twice", "num_trajectories": 0}
    with pytest.raises(NothingToTrainOn, match="All 6 runs were lost, most often with: twice"):
        check_for_runs([row, row])
    check_for_runs([row, {**row, "num_trajectories": 1}])
    check_for_runs([{"failures": {}, "commonest_failure": "", "num_trajectories": 0}])


# Components and datasets

MODULE = """
import sys
class Bad:
    def __init__(self): raise OSError("no disk")
class Exits:
    def __init__(self): sys.exit(3)
def rows():
    yield {"id": 1, "question": "q"}
    raise LookupError("no more")
"""


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, source in (("hostile", MODULE), ("exits", "exit(3)"), ("broken", "x = (")):
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("hostile", "exits", "broken"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["exits:a", "broken:a"])
def test_a_module_that_cannot_be_imported_is_named(hostile: None, name: str) -> None:
    with pytest.raises(ConfigError, match=f"Cannot import `{name}`: (SystemExit|SyntaxError)"):
        import_object(name)


@pytest.mark.parametrize("name", ["hostile:Bad", "hostile:Exits"])
def test_a_component_that_cannot_be_created_is_named(hostile: None, name: str) -> None:
    with pytest.raises(ConfigError, match=f"`{name}` cannot be created: (OSError|SystemExit): "):
        create_component(CustomConfig(_type=name))


def test_a_dataset_that_fails_is_named(hostile: None) -> None:
    with pytest.raises(ConfigError, match="`hostile:rows` failed: LookupError: no more"):
        load_examples(CustomConfig(_type="hostile:rows"))


async def test_only_the_users_code_is_interrupted_when_it_blocks_the_event_loop() -> None:
    with watch(0.05):
        time.sleep(0.3)  # as a slow disk makes the kit's own code wait
        with pytest.raises(LoopBlocked), users_code():
            time.sleep(60)
