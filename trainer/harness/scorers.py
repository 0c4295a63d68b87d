"""Evaluators from other packages, where they are installed: `math-verify` and `inspect-ai`."""

import contextlib
import importlib
import json
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from kit.errors import ConfigError, NotInstalled
from trainer.errors import BadScore
from trainer.harness.components import InspectScorerConfig, MathVerifyConfig
from trainer.harness.scores import expected_answer
from trainer.harness.types import WorkflowRun
from trainer.harness.user_code import import_object
from trainer.processes.worker import environment_without_keys

_TIMEOUT = 20.0  # seconds; the worker limits itself to 5 for each of its three steps

# `math-verify` limits its own time with signals, which only a main thread receives, and a model
# may write `9**9**9`. So it runs in a process of its own, which can be killed.
_MATH_WORKER = """
import json, sys
from math_verify import parse, verify
for line in sys.stdin:
    gold, answer, precision, strict = json.loads(line)
    parsed = parse(gold), parse(answer)
    print(int(verify(*parsed, float_rounding=precision, strict=strict)), flush=True)
"""


def _require(module: str, package: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        raise NotInstalled(
            f"The evaluator `{name}` needs `{package}`, which is not installed",
            hint=f"Install it with `pip install {package}`",
        ) from exc


def math_verify(config: MathVerifyConfig) -> Callable[[WorkflowRun], float]:
    """Return a function that compares a run's output with its answer as mathematics."""
    _require("math_verify", "math-verify", config.type)
    worker = MathWorker()

    def score(run: WorkflowRun) -> float:
        gold = expected_answer(run, config.type)
        # Bare LaTeX is only found between dollars. Plain numbers are found in both forms.
        gold = gold if "$" in gold or "\\boxed" in gold else f"${gold}$"
        return worker.score(gold, str(run.output), config.precision, config.strict)

    return score


class MathWorker:
    """The process in which `math-verify` runs; started when needed, and again after a kill."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def score(self, gold: str, answer: str, precision: int, strict: bool) -> float:
        with self._lock:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            late = threading.Event()

            def stop() -> None:
                late.set()
                process.kill()

            timer = threading.Timer(_TIMEOUT, stop)
            timer.start()
            try:
                process.stdin.write(json.dumps([gold, answer, precision, strict]) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except BrokenPipeError:
                line = ""
            finally:
                timer.cancel()
            if line:
                return float(line)
            self._end()
            if not late.is_set():
                raise BadScore(f"`math-verify` failed on `{answer[:60]}`")
            return 0.0  # an answer that takes so long is wrong

    def _running(self) -> "subprocess.Popen[str]":
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _MATH_WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment_without_keys(),
                text=True,
            )
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with process:  # closes its pipes and waits for it
                process.kill()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._end()


def inspect_scorer(config: InspectScorerConfig) -> Callable[[WorkflowRun], Awaitable[Any]]:
    """Return a function that scores a run with a scorer of `inspect-ai`."""
    scorers = _require("inspect_ai.scorer", "inspect-ai", config.type)
    solver = importlib.import_module("inspect_ai.solver")
    models = importlib.import_module("inspect_ai.model")
    if ":" in config.scorer:
        factory = import_object(config.scorer)
    elif (factory := getattr(scorers, config.scorer, None)) is None:
        raise ConfigError(
            f"`inspect-ai` has no scorer `{config.scorer}`",
            hint="Use a name such as `match`, or `module:function` of your own",
        )
    try:
        scorer = factory(**config.args)
    except TypeError as exc:
        raise ConfigError(
            f"The scorer `{config.scorer}` does not accept these arguments: {exc}",
            hint="Fix `args`",
        ) from exc
    to_float = scorers.value_to_float()

    async def score(run: WorkflowRun) -> Any:
        output = "" if run.output is None else str(run.output)
        answer = run.example.answer
        # Without an answer there is no target, and nothing matches it; "" would match everything.
        answers = answer if isinstance(answer, list) else [] if answer is None else [answer]
        question = str(run.example.question)
        state = solver.TaskState(
            model=models.ModelName("art/policy"),
            sample_id=run.example.id,
            epoch=1,
            input=question,
            choices=run.example.row.get("choices"),
            metadata=dict(run.example.row),
            messages=[
                models.ChatMessageUser(content=question),
                models.ChatMessageAssistant(content=output),
            ],
            output=models.ModelOutput.from_content("art/policy", output),
        )
        found = await scorer(state, scorers.Target(list(map(str, answers))))
        if found is None:
            raise BadScore(f"The scorer `{config.scorer}` gave no score")
        if isinstance(found.value, dict):
            values = {name: to_float(value) for name, value in found.value.items()}
            reward = sum(values.values()) / len(values)
        else:
            values, reward = {}, to_float(found.value)
        return {**values, "reward": reward, "reason": found.explanation}

    return score
