"""Agents of three frameworks with a tool, against a scripted engine that calls it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.environments import python_of, run_client
from tests.serving import Serving

CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
SCRIPT = [
    # After the tool's answer, right and wrong alternate, so the rewards of a group differ.
    {"when": "<tool_response>", "replies": ["The answer is 5.", "The answer is six."]},
    {"when": "<tools>", "replies": [CALL]},
]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory, art_cache: str) -> Iterator[Serving]:
    directory = tmp_path_factory.mktemp("scripted")
    script = directory / "script.json"
    script.write_text(json.dumps(SCRIPT))
    program = ("trainer.testing", str(script))
    with Serving(directory, "tiny-random", program=program, ART_CACHE=art_cache) as serving:
        yield serving


@pytest.mark.parametrize("framework", ["langgraph", "llamaindex", "adk"])
def test_an_agent_with_a_tool_trains_on_its_rollouts(
    scripted: Serving, framework: str, tmp_path: Path
) -> None:
    result = run_client(
        python_of("agents"),
        *("agents.py", framework, scripted.control, scripted.openai),
        cwd=tmp_path,
    )
    assert result["calls"] == [[2, 3]] * 4
    assert result["answers"] == ["The answer is 5.", "The answer is six."] * 2
    assert result["turns"] == [2, 2]
    assert result["steps"] == [1, 2]
    assert result["metrics"]["data/retokenized"] == 0
    assert result["metrics"]["loss/grad_norm"] > 0
    # Both turns of both trajectories: one token per byte, and an end token each.
    tokens = sum(len(CALL) + len(reply) + 2 for reply in SCRIPT[0]["replies"])
    assert result["metrics"]["data/step_trainer_tokens"] == tokens
    checkpoints = scripted.state / "contract" / "models" / framework / "checkpoints"
    weights = {
        json.loads((path / "manifest.json").read_text())["files"]["adapter_model.safetensors"][
            "sha256"
        ]
        for path in checkpoints.iterdir()
    }
    assert len(weights) == 3
