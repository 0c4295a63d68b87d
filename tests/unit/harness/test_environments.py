"""Environments bring their examples and rewards, and say by name what they cannot do."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kit.errors import ConfigError, NotInstalled
from trainer.harness import components as configs
from trainer.harness.config import FinetuneConfig
from trainer.harness.config_file import load_config
from trainer.harness.environments.environment import hold_out
from trainer.harness.environments.gymnasium import GymnasiumEnvironment
from trainer.harness.environments.load import load_environment, load_verifiers
from trainer.harness.environments.verifiers_tasksets import TasksetEnvironment
from trainer.harness.evaluation.results import digest
from trainer.harness.scorers import inspect_scorer, math_verify
from trainer.harness.types import Example, WorkflowRun
from trainer.harness.workflow_config import GymnasiumConfig, VerifiersConfig

ROOT = Path(__file__).parents[3]


class Policy:
    """Answers from a list, as an `Llm` would."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.prompts: list[list[Any]] = []
        self.rewards: list[float] = []

    async def chat(self, messages: list[Any]) -> dict[str, str]:
        self.prompts.append(list(messages))
        return {"content": self.answers[len(self.prompts) - 1]}

    def reward(self, value: float) -> None:
        self.rewards.append(value)


class Plain:
    """The smallest environment: no seed, no info, and an observation that is no text."""

    closed = False

    def reset(self) -> int:
        return 7

    def step(self, text: str) -> Any:
        return text.upper(), 0.5, False, len(text) > 3, None

    def close(self) -> None:
        type(self).closed = True


class Old(Plain):
    def step(self, text: str) -> Any:
        return text, 0.5, True, {}


def gymnasium(name: str, **settings: Any) -> GymnasiumEnvironment:
    env = f"{__name__}:{name}"
    return GymnasiumEnvironment(GymnasiumConfig(_type="gymnasium", env=env, llm="x", **settings))


async def test_an_episode_is_a_conversation_whose_rewards_add_up() -> None:
    environment = gymnasium("Plain", system_prompt="Play", episodes=2, validation_examples=1)
    train, (held_out,) = environment.examples("train"), environment.examples("eval")
    assert [one.row["seed"] for one in train] == [0, 1] and held_out.row["seed"] == 2
    policy = Policy("no", "yes!")
    outcome: Any = await environment.run(train[0], policy)  # type: ignore[arg-type]
    system, first = {"role": "system", "content": "Play"}, {"role": "user", "content": "7"}
    answer = {"role": "assistant", "content": "no"}
    assert policy.prompts == [
        [system, first],
        [system, first, answer, {"role": "user", "content": "NO"}],
    ]
    assert policy.rewards == [0.5, 0.5] and Plain.closed
    run = WorkflowRun(train[0], 0, output=outcome.output, state=outcome.state)
    assert run.output == "yes!"
    assert await environment.score([run]) == [{"turns": 2.0, "terminated": 0.0, "reward": 1.0}]


async def test_an_episode_ends_after_max_turns_and_may_send_only_the_last_observation() -> None:
    environment = gymnasium("Plain", max_turns=2, history="last")
    policy = Policy("a", "b", "c")
    await environment.run(environment.examples("train")[0], policy)  # type: ignore[arg-type]
    assert [len(prompt) for prompt in policy.prompts] == [1, 1]


async def test_a_step_of_another_form_is_an_error_that_says_what_is_expected() -> None:
    environment = gymnasium("Old")
    with pytest.raises(TypeError, match="`step` must return"):
        await environment.run(environment.examples("train")[0], Policy("a"))  # type: ignore[arg-type]


def example_config(name: str, monkeypatch: pytest.MonkeyPatch) -> FinetuneConfig:
    monkeypatch.chdir(ROOT / "examples" / name)
    return load_config(Path("config.yaml"))


async def test_the_gymnasium_example_plays(monkeypatch: pytest.MonkeyPatch) -> None:
    config = example_config("gymnasium", monkeypatch)
    assert config.reward_name == "environment"
    environment = load_environment(config.workflow)
    assert environment is not None
    (example, *_), held_out = environment.examples("train"), environment.examples("eval")
    assert len(held_out) == 8
    policy = Policy("one or 2? or 3?", "1", "12")
    outcome = await environment.run(example, policy)  # type: ignore[arg-type]
    assert outcome.state["turns"] == 3 and -0.1 < outcome.state["reward"] < 1.2


def test_the_verifiers_example_loads_and_its_package_is_asked_for_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = example_config("verifiers", monkeypatch)
    assert isinstance(config.workflow, VerifiersConfig)
    with pytest.raises(NotInstalled) as caught:
        load_verifiers(config.workflow)
    assert "pip install 'art-cluster[verifiers]'" in caught.value.hint


class TaskOf:
    """A task of `verifiers`, which prints with its address as most objects do."""

    def __init__(self, number: int) -> None:
        fields = {"idx": number, "prompt_text": "Speak", "answer": "hello"}
        self.data = SimpleNamespace(**fields, model_dump=lambda: dict(fields))


def test_an_example_of_a_taskset_is_known_again_by_another_process() -> None:
    digests = []
    tasksets = [[TaskOf(0), TaskOf(1)], [TaskOf(0), TaskOf(1)]]
    for tasks in tasksets:
        environment = TasksetEnvironment.__new__(TasksetEnvironment)  # `verifiers` is not needed
        environment._config = VerifiersConfig(_type="verifiers", env="x", llm="x", max_examples=2)
        environment._environment = SimpleNamespace(taskset=tasks)
        environment._examples = None
        examples: list[Any] = environment.examples("train")
        assert [example.task for example in examples] == tasks
        assert examples[0].answer == "hello"
        digests.append([digest(example) for example in examples])
    assert digests[0] == digests[1] and len(set(digests[0])) == 2


def test_packages_of_evaluators_and_environments_are_asked_for_by_name() -> None:
    asked: list[tuple[Any, str]] = [
        (lambda: math_verify(configs.MathVerifyConfig(_type="math_verify")), "math-verify"),
        (
            lambda: inspect_scorer(configs.InspectScorerConfig(_type="inspect_ai", scorer="match")),
            "inspect-ai",
        ),
        (
            lambda: GymnasiumEnvironment(
                GymnasiumConfig(_type="gymnasium", env="Text-v0", llm="x")
            ),
            "gymnasium",
        ),
    ]
    for make, package in asked:
        with pytest.raises(NotInstalled) as caught:
            make()
        assert f"pip install {package}" in caught.value.hint


def test_settings_that_do_not_go_with_the_workflow_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT / "examples" / "gymnasium")
    dataset = ("eval.general.dataset", "{_type: json, file_path: x.json}")
    with pytest.raises(ConfigError, match="`gymnasium` brings its examples"):
        load_config(Path("config.yaml"), [dataset])
    python = ("workflow", "{_type: python, function: a:b, llm: policy}")
    with pytest.raises(ConfigError, match="is `environment`, but the workflow is `python`"):
        load_config(
            Path("config.yaml"), [python, dataset, ("eval.evaluators.x._type", "environment")]
        )


def test_other_evaluators_beside_an_environment_are_metrics_or_the_reward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT / "examples" / "gymnasium")
    beside = ("eval.evaluators.right", "{_type: regex, pattern: '^1$'}")
    config = load_config(Path("config.yaml"), [beside])
    assert (config.reward_name, list(config.evaluators)) == (
        "environment",
        ["environment", "right"],
    )
    chosen = ("finetuning.reward_function.name", "right")
    assert load_config(Path("config.yaml"), [beside, chosen]).reward_name == "right"


def test_held_out_examples_are_the_last_and_some_remain() -> None:
    examples = [Example(str(number), None, None, {}) for number in range(3)]
    assert hold_out(examples, 1, "train", "x") == examples[:2]
    assert hold_out(examples, 1, "eval", "x") == examples[2:]
    assert hold_out(examples, 0, "train", "x") == examples
    with pytest.raises(ConfigError, match="has `3` examples, and `3` are held out"):
        hold_out(examples, 3, "train", "x")
