"""The learner trains on exactly the sampled tokens, under the prompts they were sampled from."""

import copy
import json
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import art
import httpx
import openai
import pytest
import torch
from art.openai import consume_chat_completion_stream
from openai.types.chat.chat_completion import Choice

from tests.serving import Serving
from trainer import exact_tokens
from trainer.base_model import tiny_random
from trainer.base_model.resolve import resolve
from trainer.base_model.tokenizer import Tokenizer
from trainer.config import LoraConfig
from trainer.learner.learner import Learner
from trainer.learner.tokenize import tokenize_trajectory
from trainer.server.ledger import Ledger, entry_of
from trainer.server.matching import find

MODEL = {"name": "exact", "project": "contract"}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
SCRIPT = [
    {"when": "Again", "replies": ["<think>more</think>Two", "<think>less</think>Three"]},
    # Every logprob of a script is the same: two such answers differ by their prompts only.
    {"when": "(One|Two) more", "replies": ["Certainly"]},
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


def train(server: Serving, rollouts: Rollouts) -> tuple[list[list[int]], dict[str, float]]:
    """Return the ids that the learner trained on, and the metrics of the step."""
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
    request = json.loads((directory / f"journal.{step:04}.json").read_text())
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
    return trained, next(
        {name.removeprefix("data/"): value for name, value in line.items()}
        for line in lines
        if line["step"] == step and "data/retokenized" in line
    )


def confident(server: Serving, question: str, reward: float) -> tuple[dict[str, Any], Any]:
    """A trajectory of two turns whose answers are those of any other question, without ids."""
    messages: list[Any] = []
    turns: list[Any] = []
    sampled = []
    for content in (question, "Sure?"):
        messages.append({"role": "user", "content": content})
        body = {"model": "exact", "messages": messages}
        answer = httpx.post(f"{server.openai}/v1/chat/completions", json=body, timeout=60).json()
        choice = answer["choices"][0]
        sampled.append(answer["prompt_token_ids"] + choice["token_ids"])
        del choice["choice_id"], choice["logprobs"]["content"][0]["choice_id"]
        turns += [messages[-1], choice]
        messages.append(choice["message"])
    return {"messages_and_choices": turns, "reward": reward}, sampled


def test_trained_ids_are_the_sampled_ids_though_the_template_drops_earlier_thinking(
    thinking: Serving, thinking_model: Path
) -> None:
    rollouts = [rollout(thinking, reward) for reward in (0.0, 1.0)]
    sampled = [ids for _, turns in rollouts for ids in turns]
    second_turn = Tokenizer(thinking_model).decode(sampled[1])
    assert "One" in second_turn and "hm" not in second_turn  # the template dropped it
    assert "look" in second_turn
    trained, metrics = train(thinking, rollouts)
    assert trained == sampled
    assert (metrics["exact_prompts"], metrics["rendered_prompts"]) == (4, 0)
    assert metrics["retokenized"] == metrics["ambiguous_choices"] == 0


def test_without_the_ledger_prompts_are_rendered_and_counted(thinking: Serving) -> None:
    rollouts = [rollout(thinking, reward) for reward in (0.0, 1.0)]
    with sqlite3.connect(thinking.state / "ledger.db") as ledger:
        assert ledger.execute("DELETE FROM completions").rowcount >= 4
    trained, metrics = train(thinking, rollouts)
    assert trained != [ids for _, turns in rollouts for ids in turns]
    # The logprobs of the other two belong to thoughts that the template drops.
    assert (metrics["retokenized"], metrics["choices_without_logprobs"]) == (0, 2)
    assert (metrics["exact_prompts"], metrics["rendered_prompts"]) == (0, 2)


def test_the_same_confident_answers_to_two_prompts_train_under_their_own(
    thinking: Serving,
) -> None:
    questions = (("One more", 0.0), ("Two more", 1.0))
    rollouts = [confident(thinking, *question) for question in questions]
    trained, metrics = train(thinking, rollouts)
    assert trained == [ids for _, turns in rollouts for ids in turns]
    assert (metrics["exact_prompts"], metrics["ambiguous_choices"]) == (4, 0)


def test_an_answer_that_fits_two_prompts_is_counted_and_not_trained(thinking: Serving) -> None:
    questions = (("One more", 0.0), ("Two more", 1.0))
    rollouts = [confident(thinking, *question) for question in questions]
    for trajectory, _ in rollouts:
        trajectory["messages_and_choices"][0]["content"] = "rewritten by a framework"
    trained, metrics = train(thinking, rollouts)
    assert trained == []
    assert (metrics["ambiguous_choices"], metrics["dropped_ambiguous"]) == (4, 2)
    assert "art_ambiguous_choices_total 4" in httpx.get(f"{thinking.openai}/metrics").text


def test_a_text_without_logprobs_and_id_is_not_trained_as_what_was_once_sampled(
    thinking: Serving,
) -> None:
    rollouts = [rollout(thinking, reward) for reward in (0.0, 1.0)]
    with sqlite3.connect(thinking.state / "ledger.db") as ledger:
        # No other conversation said it, and none has the same prompt.
        ledger.execute("DELETE FROM completions WHERE created < ?", (time.time() - 3600,))
    copied = copy.deepcopy(rollouts[0][0]["messages_and_choices"][1])
    del copied["choice_id"]
    copied["logprobs"] = None
    other = {"messages_and_choices": [{"role": "user", "content": "?"}, copied], "reward": 0.5}
    trained, metrics = train(thinking, [*rollouts, (other, [])])
    assert trained == [ids for _, turns in rollouts for ids in turns]
    assert metrics["dropped_no_logprobs"] == 1


def test_a_reward_that_is_left_out_is_zero_in_the_step_and_in_its_history(
    thinking: Serving,
) -> None:
    rollouts = [rollout(thinking, reward) for reward in (0.0, 1.0)]
    del rollouts[0][0]["reward"]
    trained, metrics = train(thinking, rollouts)
    assert len(trained) == 4 and metrics["train/reward"] == 0.5


QUESTION: Any = [{"role": "user", "content": "Say it"}]
BODY = {"model": "tiny-random", "messages": QUESTION, "max_tokens": 8}


async def test_the_id_of_a_choice_survives_the_objects_of_openai_and_art(server: Serving) -> None:
    ledger = Ledger(server.state / "ledger.db")
    client = openai.AsyncOpenAI(base_url=f"{server.openai}/v1", api_key="x")
    create = client.chat.completions.create
    # openai's own stream takes only answers that end by themselves.
    shape = {"structured_outputs": {"choice": ["a pear", "a plum"]}}
    settings: Any = {**BODY, "logprobs": True, "extra_body": shape}
    whole = await create(**settings)
    async with client.chat.completions.stream(**settings) as stream:
        streamed = await stream.get_final_completion()
    consumed = await consume_chat_completion_stream(await create(**settings, stream=True))
    await client.close()
    for answer in (whole, streamed, consumed):
        # openai's stream gives a subclass of its own, which ART's trajectories take all the same.
        choice = Choice.model_validate(answer.choices[0].model_dump())
        trajectory = art.Trajectory(messages_and_choices=[*QUESTION, choice], reward=1.0)
        again = art.Trajectory.model_validate_json(trajectory.model_dump_json(warnings="none"))
        sent = again.model_dump(mode="json", warnings="none")["messages_and_choices"][1]
        row = ledger.with_id(exact_tokens.choice_id(sent) or "")
        assert row and row.completion_ids, sent
        found = find(ledger, sent, Tokenizer(resolve("tiny-random")))
        assert found and found.id == row.id
    ledger.close()


def test_every_turn_of_plain_messages_goes_on_from_the_sampled_tokens(server: Serving) -> None:
    tokenizer = Tokenizer(resolve("tiny-random"))
    # Random weights write halves of characters, which the text shows as other characters. Special
    # tokens it does not show at all.
    halves = {"logit_bias": {str(token): -100 for token in range(256, 260)}}
    messages: list[Any] = []
    sampled: list[int] = []
    for question in ("Begin", "Go on", "And then?"):
        messages.append({"role": "user", "content": question})
        body = {**BODY, **halves, "messages": messages, "max_tokens": 24}
        answer = httpx.post(f"{server.openai}/v1/chat/completions", json=body, timeout=60).json()
        prompt, choice = answer["prompt_token_ids"], answer["choices"][0]
        asked = {"model": BODY["model"], "messages": messages}
        counted = httpx.post(f"{server.openai}/v1/messages/count_tokens", json=asked, timeout=60)
        assert counted.json() == {"input_tokens": len(prompt)}
        assert prompt[: len(sampled)] == sampled
        sampled = prompt + choice["token_ids"]
        text = choice["message"]["content"]
        assert tokenizer.encode(text) != choice["token_ids"]
        messages.append({"role": "assistant", "content": text})


def test_a_constrained_choice_trains_with_the_logprobs_that_the_learner_computes(
    server: Serving,
) -> None:
    model = {"name": "constrained", "project": "contract", "base_model": "tiny-random"}
    server.post("/_prepare_backend_for_training", {"model": model})
    shape = {"structured_outputs": {"choice": ["a pear", "a plum"]}}
    url = f"{server.openai}/v1/chat/completions"
    body = {**BODY, "model": "constrained"}
    choices = [
        httpx.post(url, json={**body, **more}, timeout=60).json()["choices"][0]
        for more in (shape, {})
    ]
    assert choices[0]["message"]["content"] in ("a pear", "a plum")
    ledger = Ledger(server.state / "ledger.db")
    rows = [ledger.with_id(choice["choice_id"]) for choice in choices]
    entries = [entry_of(row) for row in rows if row]
    ledger.close()
    assert [entry.constrained for entry in entries] == [True, False]
    learner = Learner(
        "tiny-random", resolve("tiny-random"), dtype=torch.float32, device=torch.device("cpu")
    )
    checkpoints = server.state / "contract" / "models" / "constrained" / "checkpoints"
    for entry in entries:
        tokens = {"prompt_ids": entry.prompt_ids, "completion_ids": entry.completion_ids}
        assert learner.score(checkpoints, 0, LoraConfig(), **tokens) == pytest.approx(
            entry.logprobs, abs=1e-3
        )
    # After `a p` only two letters are allowed: the constraint would give one of them half.
    assert min(entries[0].logprobs) < -2
    turns = [[*QUESTION, choice] for choice in choices]
    group = {
        "trajectories": [
            {"messages_and_choices": items, "reward": reward}
            for items, reward in zip(turns, (0.0, 1.0), strict=True)
        ]
    }
    rows_of_step = httpx.post(
        f"{server.control}/_train_model",
        json={"model": model, "trajectory_groups": [group]},
        timeout=120,
    ).text
    metrics = json.loads(rows_of_step.splitlines()[0])
    assert (metrics["data/exact_prompts"], metrics["data/constrained_share"]) == (2, 0.5)
