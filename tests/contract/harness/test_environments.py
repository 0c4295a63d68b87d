"""Environments of real packages, each trained for an epoch by `trainer finetune`."""

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.environments import client_environment, python_of

TALK = """
import verifiers as vf
from datasets import Dataset


class Talk(vf.MultiTurnEnv):
    async def rollout(self, input, client, model, sampling_args):
        # An empty reply is an error to `verifiers`, and a random model gives one now and then.
        words = {"extra_body": {"min_tokens": sampling_args["max_tokens"]}}
        return await super().rollout(input, client, model, {**sampling_args, **words})

    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "Go on"}]


def characters(completion) -> float:
    return float(sum(len(message["content"]) for message in completion))


def different(completions, **kwargs) -> list[float]:
    \"\"\"A reward that compares the runs of an example.\"\"\"
    return [number / len(completions) for number in range(len(completions))]


def load_environment(rows: int = 2):
    questions = [{"question": f"Question {n}", "answer": str(n)} for n in range(rows)]
    return Talk(
        dataset=Dataset.from_list(questions),
        eval_dataset=Dataset.from_list(questions[:1]),
        rubric=vf.Rubric(funcs=[characters, different], weights=[0.0, 1.0]),
        max_turns=2,
    )
"""
TASKS = """
import verifiers.v1 as vf


class Speak(vf.Task[vf.TaskData]):
    @vf.reward(weight=0.5)
    async def mixed(self, trace: vf.Trace) -> float:
        return sum(map(ord, trace.last_reply)) % 97 / 97

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SpeakTaskset(vf.Taskset[Speak]):
    INFINITE = True

    def load(self):
        while True:
            yield Speak(vf.TaskData(prompt="Speak"), self.config.task)


__all__ = ["SpeakTaskset"]
"""
GAME = """
class Game:
    def reset(self, seed=None):
        return f"Begin {seed}", {}

    def step(self, text):
        return "Go on", sum(map(ord, text)) % 97 / 97, False, False, {"length": len(text)}
"""
SCORERS = """
import asyncio, json
import pydantic
from trainer.harness.components import EvaluatorConfig
from trainer.harness.evaluators import Scorer, load_evaluators
from trainer.harness.llm import Llms
from trainer.harness.types import Example, WorkflowRun

cases = [
    ({"_type": "math_verify"}, "so it is \\\\boxed{1/2}", "0.5"),
    ({"_type": "math_verify"}, "$\\\\frac{2}{4}$", "\\\\frac{1}{2}"),
    ({"_type": "math_verify"}, "7", "8"),
    ({"_type": "math_verify"}, "9**9**9**9", "8"),
    ({"_type": "inspect_ai", "scorer": "match"}, "it is 7", "7"),
    ({"_type": "inspect_ai", "scorer": "includes"}, "a b c", "z"),
    ({"_type": "inspect_ai", "scorer": "pattern", "args": {"pattern": "A: (.)"}}, "A: 1", "1"),
    ({"_type": "inspect_ai", "scorer": "includes"}, "None", None),
    ({"_type": "inspect_ai", "scorer": "match"}, None, "None"),
]

async def main():
    rewards = []
    for config, output, answer in cases:
        parsed = pydantic.TypeAdapter(EvaluatorConfig).validate_python(config)
        run = WorkflowRun(Example("e", "q", answer, {}), 0, output=output)
        await Scorer(load_evaluators({"x": parsed}, Llms({})), "x").score([run])
        rewards.append(run.reward if run.failure is None else run.error)
    print(json.dumps(rewards))

asyncio.run(main())
"""


def train(project: Any, workflow: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Train for an epoch; return its metrics and its runs."""
    project.config["workflow"] = {"llm": "training_llm", **workflow}
    project.config["llms"]["training_llm"]["max_tokens"] = 6
    project.config["eval"] = {"general": {"output_dir": "runs"}}
    del project.config["finetuning"]["reward_function"]
    project.finetune("-o", "finetuning.num_epochs", "1")
    (row,) = project.read("training_metrics.jsonl")
    runs = (project.directory / "runs" / "epoch_0001.jsonl").read_text().splitlines()
    validation = (project.directory / "runs" / "validation_0001.jsonl").read_text().splitlines()
    assert len(validation) == 1
    assert row["failures"] == {}, runs
    assert row["data/retokenized"] == 0
    return row, list(map(json.loads, runs))


def test_an_environment_of_classic_verifiers_trains_on_all_its_turns(project: Any) -> None:
    project.python = str(python_of("verifiers-classic"))
    (project.directory / "talk.py").write_text(TALK)
    workflow = {"_type": "verifiers", "env": "talk", "args": {"rows": 2}, "validation_examples": 1}
    row, runs = train(project, workflow)
    assert row["num_trajectories"] == 4 and row["data/step_num_groups_trainable"] == 2
    assert [run["calls"] for run in runs] == [2] * 4  # two turns each
    assert sorted(run["reward"] for run in runs) == [0.0, 0.0, 0.5, 0.5]
    assert all(run["metrics"]["different"] == run["reward"] for run in runs)


def test_a_taskset_of_the_newest_verifiers_trains_through_its_own_program(project: Any) -> None:
    project.python = str(python_of("verifiers"))
    (project.directory / "speak.py").write_text(TASKS)
    workflow = {"_type": "verifiers", "env": "speak", "max_examples": 2}
    row, runs = train(project, {**workflow, "validation_examples": 1})
    assert row["num_trajectories"] == 2
    assert all(run["calls"] == 1 and set(run["metrics"]) == {"mixed", "length"} for run in runs)
    assert all(run["reward"] == run["metrics"]["mixed"] / 2 for run in runs)


def test_a_gymnasium_style_environment_trains_on_every_step(project: Any) -> None:
    (project.directory / "game.py").write_text(GAME)
    workflow = {"_type": "gymnasium", "env": "game:Game", "episodes": 2, "max_turns": 2}
    row, runs = train(project, {**workflow, "validation_examples": 1})
    assert row["num_trajectories"] == 4
    assert all(run["calls"] == run["metrics"]["turns"] == 2 for run in runs)
    assert all(run["metrics"]["length"] == len(run["output"]) for run in runs)


def test_scores_of_math_verify_and_inspect_ai(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(python_of("verifiers")), "-c", SCORERS],
        cwd=tmp_path,
        env=client_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [1, 1, 0, 0, 1, 0, 1, 0, 0]
