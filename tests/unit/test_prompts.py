"""Very long prompts are refused before they are tokenized, and never block other requests."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from trainer.base_model.resolve import resolve
from trainer.base_model.tokenizer import Tokenizer
from trainer.engines.engine import Delta
from trainer.errors import TooLong
from trainer.server import exact_prompts, prompts
from trainer.server.error_answers import add_handlers
from trainer.server.ledger import Ledger
from trainer.server.messages.errors import AnthropicErrors
from trainer.server.routes import completions, messages, openai, responses

LONG = "wörd " * 100_000


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve("tiny-random"))


@pytest.fixture
def client(tokenizer: Tokenizer, tmp_path: Path) -> httpx.AsyncClient:
    """The four APIs over a backend that samples one token."""

    async def sample(*_: Any, **__: Any) -> AsyncIterator[tuple[int, Delta]]:
        yield 0, Delta(0, [7], [-1.0], "a", "stop")

    backend: Any = SimpleNamespace(
        models=SimpleNamespace(find=lambda name: None),
        workers=SimpleNamespace(tokenizer=tokenizer),
        rollouts=SimpleNamespace(),
        responses=SimpleNamespace(item=None, put=lambda *_: None),
        threads=SimpleNamespace(),
        sample=sample,
        encode=partial(exact_prompts.encode, tokenizer=tokenizer, ledger=Ledger(tmp_path / "l.db")),
    )
    app = FastAPI()
    add_handlers(app)
    app.add_middleware(AnthropicErrors)
    for api in (openai, completions, responses, messages):
        app.include_router(api.routes(backend))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


def bodies(text: str) -> dict[str, Any]:
    said = {"messages": [{"role": "user", "content": text}]}
    return {
        "/v1/chat/completions": said,
        "/v1/completions": {"prompt": text},
        "/v1/responses": {"input": text, "store": False},
        "/v1/messages": {**said, "max_tokens": 1},
        "/v1/messages/count_tokens": said,
    }


@pytest.mark.parametrize("path", bodies(""))
async def test_a_text_that_cannot_fit_is_refused_without_tokenizing_it(
    path: str, client: httpx.AsyncClient, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "encode", lambda text: pytest.fail("tokenized"))
    response = await client.post(path, json={"model": "m", **bodies(LONG)[path]})
    assert response.status_code == 400
    error = response.json()["error"]
    assert "this model's maximum context length is 8192 tokens" in error["message"]
    anthropic = path.startswith("/v1/messages")
    assert error.get("code") == (None if anthropic else "context_length_exceeded")


async def test_more_messages_than_tokens_are_refused(client: httpx.AsyncClient) -> None:
    message = {"role": "user", "content": "a"}
    body = {"model": "m", "messages": [message] * 10_000}
    error = (await client.post("/v1/chat/completions", json=body)).json()["error"]
    assert error["code"] == "context_length_exceeded" and "10000 messages" in error["message"]


async def test_more_tokens_than_fit_are_refused(client: httpx.AsyncClient) -> None:
    body = {"model": "m", "prompt": [[7] * 10_000]}
    error = (await client.post("/v1/completions", json=body)).json()["error"]
    assert error["code"] == "context_length_exceeded" and "10000 tokens" in error["message"]


@pytest.mark.parametrize("path", bodies(""))
async def test_other_requests_are_answered_while_a_long_prompt_is_read(
    path: str, client: httpx.AsyncClient, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer.__dict__["context"] = None  # as for a model whose context is as long
    encode, reading, go_on = tokenizer.encode, threading.Event(), threading.Event()

    def encode_later(text: str) -> list[int]:
        reading.set()
        assert go_on.wait(60)  # which only another request can allow
        return encode(text)

    async def another_request() -> None:
        while not reading.is_set():
            await asyncio.sleep(0.002)
        go_on.set()

    monkeypatch.setattr(tokenizer, "encode", encode_later)
    other = asyncio.create_task(another_request())
    content = json.dumps({"model": "m", **bodies(LONG[:100_000])[path]})
    response = await client.post(
        path, content=content, headers={"content-type": "application/json"}
    )
    assert response.status_code == 200
    await other


def test_no_prompt_that_fits_is_refused(tokenizer: Tokenizer) -> None:
    longest = max(range(tokenizer.vocab_size), key=lambda id: len(tokenizer.token_bytes(id)))
    text = tokenizer.token_bytes(longest).decode() * 8192
    assert prompts.encode(text, tokenizer) == [longest] * 8192
    with pytest.raises(TooLong):
        prompts.encode(text + "a", tokenizer)


def test_a_large_request_is_told_from_a_small_one_without_reading_all_of_it() -> None:
    assert not prompts.is_large([{"content": "a" * 1000}] * 10)
    assert prompts.is_large({"content": "a" * prompts.LARGE})
    assert prompts.is_large([{"content": [{"text": "a"}]}] * prompts.LARGE)
    assert prompts.is_large([[7] * prompts.LARGE])
