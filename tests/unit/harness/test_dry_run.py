"""The checks of `trainer dry-run`, and its arithmetic against what was measured on a GPU."""

import sys
from typing import Any

import pytest

from kit.errors import ConfigError
from kit.gpus import CARDS, find_card, sampling_seconds, training_seconds
from kit.model_shape import parse_shape
from trainer.harness.config import FinetuneConfig
from trainer.harness.dry_run import check_runs, estimate
from trainer.harness.prices import price_of
from trainer.harness.types import Completion, Example, Failure, WorkflowRun

SEVEN_B = parse_shape(
    {
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "7B",
)
TOOL = {"type": "function", "function": {"name": "price", "parameters": {}}}
CALL = {"id": "1", "type": "function", "function": {"name": "price", "arguments": "{}"}}


def config(**training: Any) -> FinetuneConfig:
    backend = {"ip": "127.0.0.1", "port": 1, "base_model": "HuggingFaceTB/SmolLM2-135M-Instruct"}
    adapter = {"_type": "openpipe_art_trainer_adapter", "backend": backend, "training": training}
    return FinetuneConfig.model_validate(
        {
            "llms": {"policy": {"_type": "openai", "model_name": "m"}},
            "workflow": {"_type": "python", "function": "a:b", "llm": "policy"},
            "eval": {"evaluators": {"mine": {"_type": "python", "function": "a:c"}}},
            "trainer_adapters": {"backend": adapter},
            "finetuning": {"trainer_adapter": "backend", "num_epochs": 3},
        }
    )


def group(*rewards: float, finish: str = "stop", **message: Any) -> list[WorkflowRun]:
    choice = {
        "message": {"role": "assistant", "content": "", **message},
        "finish_reason": finish,
        "logprobs": {"content": [{"token": "token_id:1", "logprob": -1.0}] * 10},
    }
    example = Example("1", "?", "!", {})
    return [
        WorkflowRun(
            example,
            number,
            completions=[Completion("policy", None, [], choice, tools=[TOOL], prompt_tokens=90)],
            reward=reward,
        )
        for number, reward in enumerate(rewards)
    ]


def problems(runs: list[WorkflowRun], **training: Any) -> list[str]:
    training.setdefault("learning_rate", 1e-5)
    calls = [run.completions for run in runs]
    return [one.message for one in check_runs(config(**training), runs, calls) if not one.ok]


def test_a_group_that_teaches_passes_every_check() -> None:
    assert problems(group(0.0, 1.0, tool_calls=[CALL])) == []


@pytest.mark.parametrize(
    ("runs", "training", "message"),
    [
        (group(0.5, 0.5, tool_calls=[CALL]), {}, "in the others all rewards are equal"),
        (group(0.0, 1.0), {}, "No run called one of the tools price"),
        (group(0.0, 1.0, finish="length", tool_calls=[CALL]), {}, "cut off by `max_tokens`"),
        (group(0, 1, tool_calls=[CALL]), {"max_seq_length": 99}, "longer than `max_seq_length`"),
        (group(0.0, 1.0, tool_calls=[CALL]), {"learning_rate": 1e-9}, "too small to change"),
    ],
)
def test_what_keeps_a_run_from_learning_is_found_before_it(
    runs: list[WorkflowRun], training: dict[str, Any], message: str
) -> None:
    (found,) = problems(runs, **training)
    assert message in found


def test_missing_logprobs_and_lost_runs_are_found() -> None:
    runs = group(0.0, 1.0, tool_calls=[CALL])
    for run in runs:
        run.completions[0].choice = {**run.completions[0].choice, "logprobs": None}
    assert "without log probabilities" in problems(runs)[0]
    runs = group(0.0, 1.0, 0.5, tool_calls=[CALL])
    runs[1].fail(Failure.EVALUATOR, "`nan`, not a finite number")
    (lost,) = problems(runs)
    assert lost == "1 of 3 runs were lost (1 evaluator_failed): `nan`, not a finite number"


def test_tokens_minutes_and_dollars_are_those_of_all_epochs() -> None:
    runs = group(0.0, 1.0)
    calls = [run.completions for run in runs]
    here = estimate(config(), calls, 6.0, 20, None, None)
    assert here["epoch"] == {
        "sampled_tokens": 200,
        "prompt_tokens": 1800,
        "minutes": 1.0,
        "dollars": None,
    }
    assert (here["run"]["minutes"], here["longest_conversation_tokens"]) == (3.0, 100)
    there = estimate(config(), calls, 6.0, 20, CARDS["H100"], 3600.0)
    assert there["run"]["dollars"] == pytest.approx(3 * there["epoch"]["dollars"], rel=0.01)
    assert there["epoch"]["dollars"] > 1.0  # at a dollar a second, a step takes more than one


def test_estimated_times_are_near_those_measured_on_an_h200() -> None:
    # bench/results/gpu_smoke.md: 131,000 tokens sampled by 256 at once, and 143,000 trained on.
    card = CARDS["H200"]
    assert sampling_seconds(SEVEN_B, card, tokens=131_000, at_once=256) == pytest.approx(
        9.4, rel=0.2
    )
    assert training_seconds(SEVEN_B, card, tokens=143_000) == pytest.approx(8.0, rel=0.2)


def test_an_unknown_card_is_refused_with_the_known_ones() -> None:
    assert find_card("h100").name == "H100"
    with pytest.raises(ConfigError, match="no card `H1000`") as error:
        find_card("H1000")
    assert "A100-80GB" in error.value.hint


@pytest.mark.parametrize(
    ("script", "price", "words"),
    [
        ("print('[{\"card\": \"H100\", \"count\": 1, \"per_hour\": 3.3, \"cloud\": \"aws\"}]')",
         3.3, "H100 costs $3.30 an hour on aws"),
        ("print('[]')", None, "unknown (no cloud that SkyPilot can rent from lists it)"),
        ("import sys; sys.exit('error: SkyPilot is not installed')", None,
         "unknown (SkyPilot is not installed); give it with `--price`"),
        ("print('garbage')", None, "The price of H100 is unknown"),
    ],
)  # fmt: skip
def test_the_price_of_a_card_comes_from_the_launcher(
    script: str, price: float | None, words: str
) -> None:
    found, sentence = price_of("H100", [sys.executable, "-c", script])
    assert found == price and words in sentence
