"""From an agent's run to a trajectory: every turn is trained, exactly as it was sampled."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving import Serving
from trainer.base_model.resolve import resolve
from trainer.base_model.tokenizer import Tokenizer
from trainer.client import ArtBackend, Rollout, rollout, trajectory
from trainer.errors import NotConnected, NotFound
from trainer.learner.tokenize import tokenize_trajectory
from trainer.server.ledger import Ledger
from trainer.server.matching import recall

MODEL = {"name": "rollouts", "project": "contract", "base_model": "tiny-random"}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


class Agent:
    """Chats as agents do, and notes the ids of every sampled choice with those of its prompt."""

    def __init__(self, run: Rollout) -> None:
        self.run = run
        self.sampled: list[tuple[list[int], list[int]]] = []

    def chat(self, messages: list[Any], **settings: Any) -> list[Any]:
        """Return the conversation of each choice."""
        body = {"model": self.run.model, "messages": messages, "max_tokens": 8, **settings}
        url = f"{self.run.base_url}/chat/completions"
        answer = httpx.post(url, json=body, timeout=60).raise_for_status().json()
        prompt = answer["prompt_token_ids"]
        self.sampled += [(prompt, choice["token_ids"]) for choice in answer["choices"]]
        return [[*messages, choice["message"]] for choice in answer["choices"]]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def work(agent: Agent) -> None:
    """Three turns, two branches of the second, another agent with a tool, and two choices."""
    (first,) = agent.chat([user("Begin")])
    (second,) = agent.chat([*first, user("Go on")])
    agent.chat([*second, user("End")])
    agent.chat([*first, user("Go elsewhere")])
    (planned,) = agent.chat([{"role": "system", "content": "Plan"}, user("Begin")], tools=TOOLS)
    chosen = agent.chat([*planned, user("Two ways")], n=2, tools=TOOLS)[1]
    agent.chat([*chosen, user("Which?")], tools=TOOLS)


@pytest.fixture(scope="module")
def trainable(server: Serving) -> Serving:
    server.post("/_prepare_backend_for_training", {"model": MODEL})
    return server


def trained(server: Serving, given: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """Return the prompt and the tokens of every choice that the learner would train on."""
    ledger = Ledger(server.state / "ledger.db")
    tokenizer = Tokenizer(resolve("tiny-random"))
    recall(ledger, [{"trajectories": [given]}], tokenizer)
    ledger.close()
    found = []
    for sequence in tokenize_trajectory(tokenizer, given).sequences:
        for at, (before, chosen) in enumerate(
            zip([False, *sequence.mask], [*sequence.mask, False], strict=True)
        ):
            if chosen and not before:
                begin = at
            elif before and not chosen:
                found.append((sequence.ids[:begin], sequence.ids[begin:at]))
    return found


async def test_every_turn_of_a_rollout_is_trained_as_it_was_sampled(trainable: Serving) -> None:
    group, tokens = [], 0
    for number in range(2):
        run = rollout("rollouts", base_url=f"{trainable.openai}/v1")
        with run:
            agent = Agent(run)
            work(agent)
        assert len(agent.sampled) == 8
        one = run.trajectory(float(number), metrics={"turns": len(run.turns)}, as_json=True)
        assert (one["reward"], one["metrics"]) == (number, {"turns": 8})
        lengths = [len(one["messages_and_choices"])]
        lengths += [len(history["messages_and_choices"]) for history in one["additional_histories"]]
        # The first conversation; its branch; the other agent's; the choice that went on.
        assert lengths == [6, 4, 5, 7]
        assert [h["tools"] for h in one["additional_histories"]] == [None, TOOLS, TOOLS]
        group.append(one)
        tokens += sum(len(completion) for _, completion in agent.sampled)
        copied = json.loads(json.dumps(one))
        assert sorted(trained(trainable, copied)) == sorted(agent.sampled)
    body = {"model": MODEL, "trajectory_groups": [{"trajectories": group}]}
    response = httpx.post(f"{trainable.control}/_train_model", json=body, timeout=120)
    row = json.loads(response.raise_for_status().text.splitlines()[0])
    assert row["data/step_trainer_tokens"] == tokens
    assert row["data/retokenized"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_recorded_chat_may_leave_out_its_logprobs(trainable: Serving, stream: bool) -> None:
    with rollout("rollouts", base_url=trainable.openai) as run:
        body = {"model": run.model, "messages": [user("Hi")], "max_tokens": 8, "logprobs": False}
        url = "chat/completions"
        answer = httpx.post(f"{run.base_url}/{url}", json={**body, "stream": stream}, timeout=60)
        assert "token_id:" not in answer.raise_for_status().text
        # Elsewhere nothing else would hold them.
        other = httpx.post(f"{trainable.openai}/v1/{url}", json=body, timeout=60).json()
        assert other["choices"][0]["logprobs"]["content"]
    recorded = httpx.get(f"{trainable.openai}/rollouts/{run.id}").json()
    (choice,) = recorded["completions"][0]["choices"]
    names = [token["token"] for token in choice["logprobs"]["content"]]
    assert names == [f"token_id:{token}" for token in choice["token_ids"]]
    step = recorded["completions"][0]["policy_step"]
    assert recorded["choices"] == [{**choice, "policy_step": step}]
    shorter = httpx.get(f"{trainable.openai}/rollouts/{run.id}", params={"only": "completions"})
    assert shorter.json() == {k: v for k, v in recorded.items() if k != "choices"}
    wrong = httpx.get(f"{trainable.openai}/rollouts/{run.id}", params={"only": "messages"})
    assert wrong.status_code == 422 and "only" in wrong.json()["error"]["message"]


def test_turns_of_other_apis_are_one_conversation_each(trainable: Serving) -> None:
    with rollout("rollouts", base_url=trainable.openai) as run:
        body: dict[str, Any] = {"model": run.model, "max_output_tokens": 8}
        for text in ("Begin", "Go on"):
            answer = httpx.post(f"{run.base_url}/responses", json={**body, "input": text})
            body["previous_response_id"] = answer.raise_for_status().json()["id"]
        messages: list[Any] = []
        for text in ("Open", "Close"):
            messages.append(user(text))
            body = {"model": run.model, "max_tokens": 8, "messages": messages}
            answer = httpx.post(f"{run.anthropic_url}/v1/messages", json=body)
            content = answer.raise_for_status().json()["content"]
            messages.append({"role": "assistant", "content": content})
    one = run.trajectory(1.0, as_json=True)
    (second,) = one["additional_histories"]
    for history, texts in ((one, ("Begin", "Go on")), (second, ("Open", "Close"))):
        first, reply, then, last = history["messages_and_choices"]
        assert (first["content"], then["content"]) == texts
        assert reply["token_ids"] and last["token_ids"]
    sampled = [turn.choice["token_ids"] for turn in run.turns]
    assert [completion for _, completion in trained(trainable, one)] == sampled


async def test_a_rollout_of_arts_model_becomes_arts_trajectory(
    trainable: Serving, tmp_path: Path
) -> None:
    from art import TrainableModel, Trajectory, TrajectoryGroup
    from openai import AsyncOpenAI

    backend = ArtBackend(trainable.control)
    model = TrainableModel(**MODEL, base_path=str(tmp_path))
    await model.register(backend)
    group, sampled = [], 0
    for number in range(2):
        async with (
            rollout(model) as run,
            AsyncOpenAI(base_url=run.base_url, api_key=run.api_key) as client,
        ):
            messages: list[Any] = [user("Begin")]
            for _ in range(3):
                answer = await client.chat.completions.create(
                    model=run.model, messages=messages, max_tokens=8
                )
                assert answer.usage
                sampled += answer.usage.completion_tokens
                messages += [answer.choices[0].message.model_dump(), user("Go on")]
        group.append(run.trajectory(reward=number))
    assert isinstance(group[0], Trajectory) and not group[0].additional_histories
    assert len(group[0].messages()) == 6
    result = await backend.train(model, [TrajectoryGroup(group)], learning_rate=1e-4)
    assert result.metrics["data/step_trainer_tokens"] == sampled
    # The same in one call, for code that makes the base URL itself.
    one = trajectory(group[1].metadata["rollout"], 1.0, base_url=trainable.openai)
    assert one.model_dump() == group[1].model_dump()
    await backend.close()


def test_a_rollout_without_calls_and_a_missing_server_are_said_by_name(server: Serving) -> None:
    with rollout("tiny-random", base_url=server.openai) as run:
        pass
    with pytest.raises(NotFound, match=f"Nothing was sampled in rollout `{run.id}`") as caught:
        run.trajectory(1.0)
    assert run.base_url in caught.value.hint
    with pytest.raises(NotConnected, match="Cannot reach the server"):
        trajectory("x", 1.0, base_url="http://127.0.0.1:9/v1")
    with pytest.raises(ValueError, match="the agent's own"), rollout("x", base_url="http://h:1"):
        raise ValueError("the agent's own")
