"""More chats than the server takes, and requests of a size that it refuses: others go on."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.faults.patient import BASE, MODEL, groups, prepare, sample, train
from tests.serving import Serving

LIMIT = 8
CHATS = 300
CHAT: dict[str, Any] = {"model": "run", "messages": [{"role": "user", "content": "x"}]}


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    directory = tmp_path_factory.mktemp("crowd")
    with Serving(directory, BASE, "--max-requests", str(LIMIT)) as serving:
        train(serving, 1)
        yield serving


def test_chats_beyond_the_limit_are_told_when_to_come_back(serving: Serving) -> None:
    answers: Counter[int] = Counter()
    healthy = steps = 0

    async def crowd() -> None:
        nonlocal healthy, steps
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=300, limits=limits) as http:

            async def chat(number: int) -> None:
                ask = {**CHAT, "max_tokens": 16, "stream": number % 2 == 0}
                answer = await http.post(f"{serving.openai}/v1/chat/completions", json=ask)
                answers[answer.status_code] += 1
                if answer.status_code == 429:
                    assert float(answer.headers["retry-after"]) > 0
                    assert answer.json()["error"]["code"] == "rate_limit_exceeded"

            async def step() -> None:
                nonlocal steps
                body = {"model": MODEL, "trajectory_groups": groups(2)}
                answer = await http.post(f"{serving.control}/_train_model", json=body)
                assert answer.status_code == 200, answer.text
                steps += 1

            async def watch() -> None:
                nonlocal healthy
                for _ in range(20):
                    health = await http.get(f"{serving.control}/health")
                    assert health.json() == {"status": "ok"}
                    healthy += 1

            await asyncio.gather(step(), watch(), *map(chat, range(CHATS)))

    asyncio.run(crowd())
    assert set(answers) == {200, 429} and answers.total() == CHATS
    assert answers[200] >= LIMIT
    assert (steps, healthy) == (1, 20)
    assert sample(serving) == prepare(serving) == 2  # nobody of the crowd is counted any more
    print(dict(answers))  # noqa: T201


LARGE = {
    "one prompt of 10 MB": [{"role": "user", "content": "word " * 2_000_000}],
    "250,000 messages": [{"role": "user", "content": "x"}] * 250_000,
}


@pytest.mark.parametrize("kind", LARGE)
def test_a_prompt_that_cannot_fit_is_refused_while_others_are_answered(
    kind: str, serving: Serving
) -> None:
    body = json.dumps({**CHAT, "messages": LARGE[kind]}).encode()

    async def both() -> httpx.Response:
        async with httpx.AsyncClient(timeout=300) as http:
            headers = {"content-type": "application/json"}
            url = f"{serving.openai}/v1/chat/completions"
            sent = asyncio.create_task(http.post(url, content=body, headers=headers))
            while not sent.done():
                assert (await http.get(f"{serving.control}/health")).status_code == 200
                await asyncio.sleep(0.05)
            return await sent

    answer = asyncio.run(both())
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_a_body_that_no_prompt_needs_is_refused(serving: Serving) -> None:
    body = b'{"model": "run", "messages": [' + b'"a",' * (9 << 20) + b'"a"]}'
    headers = {"content-type": "application/json"}
    url = f"{serving.openai}/v1/messages"
    answer = httpx.post(url, content=body, headers=headers, timeout=120)
    assert answer.status_code == 413 and "36 MiB is larger than 32 MiB" in answer.text
