"""Tool agents on the Responses and Messages APIs train on exactly what was sampled."""

import json
import sqlite3
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.environments import python_of, run_client
from tests.serving import Serving
from tests.trained import train
from trainer.client import trajectory

CALL = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
SCRIPT = [
    {"when": "<tool_response>", "replies": ["The answer is 5.", "The answer is six."]},
    {"when": "<tools>", "replies": [CALL]},
]
ADD: Any = {
    **{"type": "function", "name": "add", "description": "Adds"},
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    },
}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory, art_cache: str) -> Iterator[Serving]:
    directory = tmp_path_factory.mktemp("apis")
    script = directory / "script.json"
    script.write_text(json.dumps(SCRIPT))
    program = ("trainer.testing", str(script))
    with Serving(directory, "tiny-random", program=program, ART_CACHE=art_cache) as serving:
        yield serving


def prepare(server: Serving, name: str) -> None:
    model = {"name": name, "project": "contract", "base_model": "tiny-random"}
    server.post("/_prepare_backend_for_training", {"model": model})


def sampled(server: Serving, choice_id: str) -> list[int]:
    """The prompt and the completion that the ledger holds for a choice."""
    with sqlite3.connect(server.state / "ledger.db") as ledger:
        prompt, completion = ledger.execute(
            "SELECT prompt_ids, completion_ids FROM completions WHERE choice_id = ?", (choice_id,)
        ).fetchone()
    return [*array("i", prompt), *array("i", completion)]


def check_training(server: Serving, name: str, rollouts: list[str], ids: list[list[int]]) -> None:
    """Train a step on the rollouts: one sequence of ids each, which holds both of its turns."""
    trajectories = [
        trajectory(rollout, float(number), base_url=server.openai, as_json=True)
        for number, rollout in enumerate(rollouts)
    ]
    trained, metrics = train(server, name, trajectories)
    assert trained == ids
    assert metrics["data/retokenized"] == metrics["data/rendered_prompts"] == 0
    assert metrics["data/exact_prompts"] == 4 and metrics["loss/grad_norm"] > 0


def responses_agent(client: openai.OpenAI, model: str, *, stateful: bool) -> list[Any]:
    """Two turns around a tool; the second sends the first again, or only refers to it."""
    question: Any = {"role": "user", "content": "What is 2 + 3?"}
    settings: Any = {"model": model, "tools": [ADD], "instructions": "You add."}
    first: Any = client.responses.create(**settings, input=[question])
    call = first.output[-1]
    arguments = json.loads(call.arguments)
    result: Any = {
        **{"type": "function_call_output", "call_id": call.call_id},
        "output": str(arguments["a"] + arguments["b"]),
    }
    if stateful:
        settings["previous_response_id"] = first.id
        items = [result]
    else:
        items = [question, *(item.model_dump(exclude_unset=True) for item in first.output), result]
    with client.responses.stream(**settings, input=items) as stream:
        stream.until_done()
        return [first, stream.get_final_response()]


def test_an_agent_on_the_responses_api_trains_on_what_it_sampled(scripted: Serving) -> None:
    prepare(scripted, "responses")
    rollouts = ["responses-0", "responses-1"]
    ids = []
    for rollout in rollouts:
        base_url = f"{scripted.openai}/rollouts/{rollout}/v1"
        with openai.OpenAI(base_url=base_url, api_key="any", max_retries=0) as client:
            stateful = rollout == rollouts[0]
            first, second = responses_agent(client, "responses", stateful=stateful)
        assert [item.type for item in first.output] == ["message", "function_call"]
        assert second.output_text == ("The answer is 5." if stateful else "The answer is six.")
        assert {item.choice_id for item in first.output} == {first.choice_id}
        both = [sampled(scripted, response.choice_id) for response in (first, second)]
        ids += both if both[1][: len(both[0])] != both[0] else both[1:]
    check_training(scripted, "responses", rollouts, ids)


def test_an_agent_on_the_messages_api_trains_on_what_it_sampled(
    scripted: Serving, tmp_path: Path
) -> None:
    prepare(scripted, "anthropic")
    arguments = ("plain_anthropic.py", scripted.openai, "anthropic")
    result = run_client(python_of("anthropic"), *arguments, cwd=tmp_path)
    ids = []
    for answers in result["answers"]:
        first, second = answers
        assert [block["type"] for block in first["content"]] == ["text", "tool_use"]
        assert first["content"][1]["input"] == {"a": 2, "b": 3}
        assert (first["stop_reason"], second["stop_reason"]) == ("tool_use", "end_turn")
        assert first["usage"]["input_tokens"] == result["count"]
        assert second["policy_step"] == 0
        both = [sampled(scripted, answer["choice_id"]) for answer in answers]
        ids += both if both[1][: len(both[0])] != both[0] else both[1:]
    kinds = list(dict.fromkeys(result["kinds"]))
    assert kinds == [
        *("message_start", "content_block_start", "content_block_delta", "text"),
        *("content_block_stop", "input_json", "message_delta", "message_stop"),
    ]
    names = [name for name, _ in result["refusals"]]
    assert names == ["NotFoundError", "BadRequestError", "BadRequestError"]
    messages = [message for _, message in result["refusals"]]
    assert messages[0].startswith("not_found_error") and "`nope`" in messages[0]
    assert "`container`" in messages[1] and "`max_tokens`" in messages[2]
    check_training(scripted, "anthropic", ["anthropic-0", "anthropic-1"], ids)
