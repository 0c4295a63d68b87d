"""The handle that a workflow gets, against an endpoint on loopback that misbehaves on demand."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from trainer.errors import LlmRefused, LlmUnavailable
from trainer.harness import episodes
from trainer.harness.config import LlmConfig
from trainer.harness.llm import Llms
from trainer.harness.types import Example, Failure, WorkflowRun

ANSWER = {
    "created": 5,
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"content": "hi"}}],
}


class Endpoint:
    """Answers with the statuses it was given, then with 200; remembers what it was asked."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.asked: list[tuple[str, Any]] = []
        self.url = ""


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    state = Endpoint()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(404, {"detail": "Not Found"})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            state.asked.append((self.path, json.loads(body)))
            status = state.statuses.pop(0) if state.statuses else 200
            self._send(status, ANSWER if status == 200 else {"error": {"message": "not so"}})

        def _send(self, status: int, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        state.url = f"http://127.0.0.1:{server.server_port}/v1"
        yield state
        server.shutdown()


def llms(url: str, **settings: Any) -> Llms:
    config = {"_type": "openai", "model_name": "m", "base_url": url, "max_retries": 2, **settings}
    return Llms({"policy": LlmConfig.model_validate(config)})


async def test_a_call_carries_the_settings_of_the_config_and_asks_for_logprobs(
    endpoint: Endpoint,
) -> None:
    made = llms(endpoint.url, temperature=0.4, seed=3)
    assert await made.handle("r", "policy").ask("hello", max_tokens=7) == "hi"
    path, body = endpoint.asked[0]
    assert path == "/v1/chat/completions"
    assert body == {
        "model": "m", "messages": [{"role": "user", "content": "hello"}],
        "logprobs": True, "temperature": 0.4, "seed": 3, "max_tokens": 7,
    }  # fmt: skip
    await made.close()


async def test_an_overloaded_endpoint_is_asked_again(endpoint: Endpoint) -> None:
    endpoint.statuses = [503, 429]
    made = llms(endpoint.url)
    assert await made.handle("r", "policy").ask("hello") == "hi"
    assert len(endpoint.asked) == 3
    await made.close()


async def test_an_endpoint_that_stays_away_or_refuses_is_told(endpoint: Endpoint) -> None:
    endpoint.statuses = [503, 503, 503, 400]
    made = llms(endpoint.url)
    with pytest.raises(LlmUnavailable, match="LLM `policy` answered 503"):
        await made.handle("r", "policy").ask("hello")
    with pytest.raises(LlmRefused, match="answered 400: not so"):
        await made.handle("r", "policy").ask("hello")
    await made.close()
    away = llms("http://127.0.0.1:9/v1", max_retries=0)
    with pytest.raises(LlmUnavailable, match="cannot be reached"):
        await away.handle("r", "policy").ask("hello")
    await away.close()


async def test_without_a_gateway_the_handles_own_notes_are_the_record(endpoint: Endpoint) -> None:
    made = llms(endpoint.url)
    await made.probe()
    handle = made.handle("r", "policy")
    assert handle.base_url == endpoint.url
    await handle.named("plan").ask("hello")
    (said,) = await made.completions(handle)
    assert (said.function, said.text, said.recorded) == ("plan", "hi", False)
    # This endpoint gives no logprobs, so that the run cannot be trained on:
    run = WorkflowRun(Example("e", "q", "a", {}), 0, reward=1.0)
    assert episodes.build(run, [said]) is None
    assert run.failure is Failure.NO_LOGPROBS
    assert run.error == "No valid assistant messages with logprobs"
    await made.close()


def test_a_gateways_url_is_of_the_run_the_model_and_the_named_part_alone() -> None:
    made = llms("http://h:8000/v1")
    made.endpoints["policy"].records = True
    handle = made.handle("run-1/a b", "policy")
    assert handle.base_url == "http://h:8000/rollouts/run-1%2Fa%20b~policy~/v1"
    assert handle.named("plan").base_url.endswith("~policy~plan/v1")
