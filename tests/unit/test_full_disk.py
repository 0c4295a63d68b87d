"""A full or read-only disk is one sentence on every API, before and inside a stream."""

import errno
import json
import sqlite3
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kit.types import Json
from trainer.config import ServerConfig
from trainer.server.app import create_app
from trainer.server.backend import Backend
from trainer.server.messages import answer as messages
from trainer.server.responses import answer as responses


def full(code: int) -> Exception:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = code
    return error


FAULTS = [
    (OSError(errno.ENOSPC, "No space left on device"), 507),
    (OSError(errno.EDQUOT, "Disk quota exceeded"), 507),
    (OSError(errno.EROFS, "Read-only file system"), 503),
    (full(sqlite3.SQLITE_FULL), 507),
    (full(sqlite3.SQLITE_READONLY), 503),
]
ROUTES = [
    ("GET", "/v1/models", None),
    ("GET", "/rollouts/x", None),
    ("POST", "/_get_step", {"name": "m", "project": "p"}),
    ("POST", "/_train_model", {"model": {"name": "m", "project": "p"}, "trajectory_groups": []}),
    ("POST", "/v1/chat/completions", {"model": "m", "messages": [{"role": "user"}]}),
    ("POST", "/v1/responses", {"model": "m", "input": "x"}),
    (
        "POST",
        "/v1/messages",
        {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]},
    ),
]


@pytest.mark.parametrize(("fault", "status"), FAULTS)
async def test_every_api_words_a_fault_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception, status: int
) -> None:
    config = ServerConfig(state_dir=str(tmp_path))
    backend = Backend(config, openai_port=8000)

    def fail(*_: Any) -> Any:
        raise fault

    for owner, name in (
        *((backend.models, name) for name in ("get", "find", "served_names")),
        (backend.rollouts, "read"),
    ):
        monkeypatch.setattr(owner, name, fail)
    app = httpx.ASGITransport(create_app(config, backend))
    async with httpx.AsyncClient(transport=app, base_url="http://127.0.0.1") as client:
        for method, path, body in ROUTES:
            answer = await client.request(method, path, json=body)
            assert answer.status_code == status, (path, answer.text)
            assert "cannot be written" in answer.json()["error"]["message"]


async def chunks() -> AsyncGenerator[Json, None]:
    choice = {"index": 0, "finish_reason": "stop", "token_ids": [1], "logprobs": {"content": []}}
    delta = {"content": "a", "role": "assistant"}
    yield {"policy_step": 0, "choices": [{**choice, "delta": delta}]}


def broken_disk() -> Json:
    raise OSError(errno.ENOSPC, "No space left on device")


async def test_a_stream_ends_with_the_sentence_if_its_answer_cannot_be_stored() -> None:
    from trainer.server.responses.request import ResponsesRequest

    said = messages.MessageAnswer("m", lambda _: None)
    request = ResponsesRequest(model="m", input="x")
    streams = (
        messages.events(said, chunks(), 1, broken_disk),
        responses.events(responses.ResponseAnswer(request), chunks(), broken_disk),
    )
    for stream in streams:
        *_, last = [event async for event in stream]
        assert "No space left" in last, last
        assert json.loads(last.partition("data: ")[2])["type"] in ("error", "response.failed")
