"""Workers with a fake engine: nothing is sampled before the start, and a death is retried."""

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from trainer.base_model.resolve import resolve
from trainer.base_model.tokenizer import Tokenizer
from trainer.config import ServerConfig
from trainer.engines.engine import Delta, SampleRequest
from trainer.errors import NotReady, WorkerDied
from trainer.server.app import create_app
from trainer.server.backend import Backend
from trainer.server.matching import find
from trainer.server.workers import Workers, _Started

CHAT: dict[str, Any] = {"model": "b", "messages": [{"role": "user", "content": "q"}]}


class DyingEngine:
    """Dies `deaths` times after its first delta, then samples two tokens."""

    def __init__(self, deaths: int = 0) -> None:
        self.deaths = deaths

    async def sample(self, request: SampleRequest) -> AsyncIterator[Delta]:
        yield Delta(0, [7], [-1.0], "a")
        if self.deaths:
            self.deaths -= 1
            raise WorkerDied("The engine died")
        yield Delta(0, [8], [-2.0], "b", finish_reason="stop")


def started(workers: Workers, engine: Any) -> Workers:
    workers._started = _Started(engine, None, Tokenizer(resolve("tiny-random")))  # type: ignore[arg-type]
    return workers


async def sample(workers: Workers, *, stream: bool) -> list[int]:
    request = SampleRequest([1], stream=stream)
    return [delta.token_ids[0] async for delta in workers.sample(None, 0, request)]


async def test_workers_that_are_not_started_say_so() -> None:
    workers = Workers(ServerConfig())
    for name in ("engine", "learner", "tokenizer"):
        with pytest.raises(NotReady, match="not started yet"):
            getattr(workers, name)
    await workers.stop()


async def test_a_death_loses_and_repeats_no_delta() -> None:
    assert await sample(started(Workers(ServerConfig()), DyingEngine(1)), stream=False) == [7, 8]


async def test_a_stream_that_began_is_not_started_over() -> None:
    with pytest.raises(WorkerDied):
        await sample(started(Workers(ServerConfig()), DyingEngine(1)), stream=True)


async def test_an_engine_that_dies_twice_is_an_error() -> None:
    with pytest.raises(WorkerDied):
        await sample(started(Workers(ServerConfig()), DyingEngine(2)), stream=False)


@pytest.fixture
def backend(tmp_path: Path) -> Backend:
    backend = Backend(ServerConfig(state_dir=str(tmp_path)), openai_port=8000)
    started(backend.workers, DyingEngine())
    backend.models.base_model = "b"
    return backend


async def test_a_chat_is_recorded_in_the_ledger_and_in_its_rollout(backend: Backend) -> None:
    app = httpx.ASGITransport(create_app(backend.config, backend))
    async with httpx.AsyncClient(transport=app, base_url="http://127.0.0.1") as client:
        url = "/rollouts/r/v1/chat/completions"
        answer = (await client.post(url, json=CHAT)).json()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        stream = (await client.post(url, json={**CHAT, **options})).text.split("\n\n")
        rollout = (await client.get("/rollouts/r")).json()
        metrics = (await client.get("/metrics")).text
    (choice,) = answer["choices"]
    assert (choice["token_ids"], choice["message"]["content"]) == ([7, 8], "ab")
    assert len(stream) == 5 and stream[3:] == ["data: [DONE]", ""]
    assert '"prompt_token_ids"' in stream[0] and '"usage"' in stream[2]
    chunks = [json.loads(event.removeprefix("data: ")) for event in stream[:2]]
    ids = {chunk["choices"][0]["choice_id"] for chunk in chunks}
    (whole,), (streamed,) = (entry["choices"] for entry in rollout["completions"])
    assert whole == choice and {streamed["choice_id"]} == ids
    assert len({choice["choice_id"], *ids}) == 2  # every choice has an id of its own
    assert [token.get("choice_id") for token in choice["logprobs"]["content"]] == [
        choice["choice_id"],
        None,
    ]
    assert [item["choice_id"] for item in rollout["choices"]] == [choice["choice_id"], *ids]
    assert rollout["completions"][0]["messages"] == CHAT["messages"]
    entry = find(backend.ledger, choice, backend.workers.tokenizer)
    assert entry and entry.id == choice["choice_id"] and not entry.constrained
    assert entry.rollout == "r" and entry.prompt_ids == answer["prompt_token_ids"]
    assert "art_completions_total 2" in metrics and "art_sampled_tokens_total 4" in metrics


@pytest.mark.parametrize("stream", [False, True])
async def test_a_thread_of_anthropics_api_is_continued(backend: Backend, stream: bool) -> None:
    app = httpx.ASGITransport(create_app(backend.config, backend))
    first = {"role": "user", "content": "q"}
    second = {"role": "user", "content": "r"}
    request: dict[str, Any] = {"model": "b", "max_tokens": 5, "stream": stream}
    async with httpx.AsyncClient(transport=app, base_url="http://127.0.0.1") as client:

        async def send(**fields: Any) -> httpx.Response:
            return await client.post("/rollouts/r/v1/messages", json={**request, **fields})

        created = await send(system="s", messages=[first], thread={"type": "create"})
        (answer_id,) = set(re.findall(r"msg_\w+", created.text))
        thread = {"type": "continue", "previous_message_id": answer_id}
        await send(messages=[second], thread=thread)
        repeated = await send(messages=[second], thread=thread, system="s")
        unknown = await send(messages=[second], thread={**thread, "previous_message_id": "msg_1"})
        odd = await send(messages=[second], thread={"type": "fork"})
        rollout = (await client.get("/rollouts/r")).json()
    assert rollout["completions"][1]["messages"] == [
        {"role": "system", "content": "s"},
        first,
        {"role": "assistant", "content": "ab"},
        second,
    ]
    assert len(rollout["completions"]) == 2
    assert (unknown.status_code, repeated.status_code, odd.status_code) == (404, 400, 400)
    assert unknown.json()["error"]["details"] == {"error_code": "thread_not_found"}
    assert "`system`" in repeated.text and "fork" in odd.text
