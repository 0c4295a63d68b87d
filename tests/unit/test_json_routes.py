"""Large bodies are read in a thread, and identified by their bytes."""

import hashlib
import json
import random
import threading
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from trainer.server import json_routes
from trainer.server.error_answers import add_handlers
from trainer.server.json_routes import LargeJson, json_router, parse_large
from trainer.server.wire import TrainRequest

BODY = {"model": {"name": "m", "project": "p"}, "trajectory_groups": []}


def test_the_digest_is_computed_from_the_bytes_even_if_the_body_holds_one() -> None:
    sent = json.dumps({**BODY, "digest": "mine"}).encode()
    assert parse_large(sent, TrainRequest).digest == hashlib.sha256(sent).hexdigest()
    assert parse_large(sent, TrainRequest) != parse_large(sent + b" ", TrainRequest)


async def test_a_large_body_is_read_in_a_thread_and_too_large_a_one_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = []

    def read(body: bytes) -> Any:
        threads.append(threading.current_thread())
        return json.loads(body)

    monkeypatch.setattr(json_routes.strict_json, "read", read)
    monkeypatch.setattr(json_routes, "MAX_BYTES", 1 << 20)
    router = json_router()

    @router.post("/")
    async def route(body: dict[str, str]) -> int:
        return len(body["text"])

    app = FastAPI()
    app.include_router(router)
    add_handlers(app)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
        for size in (10, 1 << 19):
            assert (await http.post("/", json={"text": "x" * size})).json() == size
        refused = await http.post("/", json={"text": "x" * (2 << 20)})
    assert threads[0] is threading.main_thread() and threads[1] is not threading.main_thread()
    assert refused.status_code == 413 and refused.json()["error"]["code"] == "request_too_large"


def test_an_answer_of_many_tokens_says_what_json_says() -> None:
    random.seed(1)
    logprobs = [-random.expovariate(1) * 10.0**-power for power in range(12) for _ in range(50)]
    answer = {"text": 'é€🙂"\n\u2028', "none": None, "nested": [{"logprobs": [*logprobs, -9999.0]}]}
    response = LargeJson(answer)
    assert json.loads(response.body) == answer  # to the last bit of every number
    assert response.headers["content-type"] == "application/json"
