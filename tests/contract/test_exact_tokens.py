"""The learner trains on exactly the sampled tokens, even if a chat template rewrites history."""

import json
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving import Serving
from trainer.base_model import tiny_random
from trainer.base_model.tokenizer import Tokenizer
from trainer.learner.tokenize import tokenize_trajectory

MODEL = {"name": "exact", "project": "contract"}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
SCRIPT = [
    {"when": "Again", "replies": ["<think>more</think>Two", "<think>less</think>Three"]},
    {"when": "Begin", "replies": ["<think>hm</think>One", "<think>so</think>Uno"]},
]
# Like the templates of thinking models, keep the thoughts of the newest turn only.
FORGETFUL = tiny_random.CHAT_TEMPLATE.replace(
    "(message.content or '')",
    "((message.content or '').split('</think>')[-1] if message.role == 'assistant' "
    "else (message.content or ''))",
)


@pytest.fixture(scope="module")
def thinking_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny-random` with a template that drops earlier thinking."""
    directory = tmp_path_factory.mktemp("thinking")
    tiny_random.write(directory)
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "chat_template": FORGETFUL}))
    return directory


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory, thinking_model: Path) -> Iterator[Serving]:
    directory = tmp_path_factory.mktemp("exact")
    (directory / "script.json").write_text(json.dumps(SCRIPT))
    program = ("trainer.testing", str(directory / "script.json"))
    with Serving(directory, str(thinking_model), program=program) as serving:
        model = {**MODEL, "base_model": str(thinking_model)}
        serving.post("/_prepare_backend_for_training", {"model": model})
        yield serving


def rollout(server: Serving, reward: float) -> tuple[dict[str, Any], list[list[int]]]:
    """Return a trajectory as frameworks send it, and the sampled prompt and completion ids.

    Like NAT's, it has no tools. Its first choice has token ids, its second only their text.
    """
    messages: list[Any] = []
    turns: list[Any] = []
    sampled = []
    for question in ("Begin", "Again"):
        messages.append({"role": "user", "content": question})
        body = {"model": "exact", "messages": messages, "tools": TOOLS}
        answer = httpx.post(f"{server.openai}/v1/chat/completions", json=body, timeout=60).json()
        choice = answer["choices"][0]
        sampled.append(answer["prompt_token_ids"] + choice.pop("token_ids"))
        turns += [messages[-1], choice]
        messages.append(choice["message"])
    for token in turns[-1]["logprobs"]["content"]:
        token["token"] = "text"
    return {"messages_and_choices": turns, "reward": reward}, sampled


Rollouts = list[tuple[dict[str, Any], list[list[int]]]]


def train(server: Serving, rollouts: Rollouts) -> tuple[list[list[int]], float]:
    """Return the ids that the learner trained on, and how many choices it tokenized again."""
    # A job stays in the journal until a client reads its result, so its request can be read here.
    group = {"trajectories": [trajectory for trajectory, _ in rollouts]}
    job = {"model_id": "contract~exact", "trajectory_groups": [group]}
    created = httpx.post(f"{server.openai}/v1/preview/training-jobs", json=job, timeout=60)
    job_id = created.raise_for_status().json()["id"]
    step = int(job_id.rpartition("~")[2])
    deadline = time.monotonic() + 120
    while server.post("/_get_step", MODEL) < step:
        assert time.monotonic() < deadline, server.log.read_text()[-2000:]
        time.sleep(0.1)
    directory = server.state / "contract" / "models" / "exact"
    request = json.loads((directory / "journal.json").read_text())
    tokenizer = Tokenizer(Path(request["base_model"]))
    trained = [
        sequence.ids
        for trajectory in request["groups"][0]["trajectories"]
        for sequence in tokenize_trajectory(tokenizer, trajectory).sequences
    ]
    httpx.get(
        f"{server.openai}/v1/preview/training-jobs/{job_id}/events", timeout=60
    ).raise_for_status()
    lines = [json.loads(line) for line in (directory / "history.jsonl").read_text().splitlines()]
    return trained, next(line["data/retokenized"] for line in lines if line["step"] == step)


def test_trained_ids_are_the_sampled_ids_though_the_template_drops_earlier_thinking(
    thinking: Serving, thinking_model: Path
) -> None:
    rollouts = [rollout(thinking, reward) for reward in (0.0, 1.0)]
    sampled = [ids for _, turns in rollouts for ids in turns]
    second_turn = Tokenizer(thinking_model).decode(sampled[1])
    assert "One" in second_turn and "hm" not in second_turn  # the template dropped it
    assert "look" in second_turn
    assert train(thinking, rollouts) == (sampled, 0)


def test_without_the_ledger_trained_ids_differ_from_sampled_ids(thinking: Serving) -> None:
    rollouts = [rollout(thinking, reward) for reward in (0.0, 1.0)]
    with sqlite3.connect(thinking.state / "ledger.db") as ledger:
        assert ledger.execute("DELETE FROM completions").rowcount >= 4
    trained, retokenized = train(thinking, rollouts)
    assert trained != [ids for _, turns in rollouts for ids in turns]
    assert retokenized == 2
