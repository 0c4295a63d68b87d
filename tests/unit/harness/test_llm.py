"""`Llm` handles against a loopback endpoint that fails on demand."""

import asyncio
import json
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from kit.http_client import ConnectionFailed, Response, ResponseTimeout
from trainer.errors import LlmRefused, LlmUnavailable
from trainer.harness import episodes
from trainer.harness.components import ArtTrainerAdapterConfig
from trainer.harness.config import LlmConfig
from trainer.harness.llm import Llms
from trainer.harness.types import Example, Failure, WorkflowRun

ANSWER = {
    "created": 5,
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"content": "hi"}}],
}


class Endpoint:
    """Answers with the given statuses, then with 200, and keeps all requests."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.requests: list[tuple[str, Any]] = []
        self.answer: Any = ANSWER
        self.url = ""


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    state = Endpoint()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(404, {"detail": "Not Found"})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            state.requests.append((self.path, json.loads(body)))
            status = state.statuses.pop(0) if state.statuses else 200
            self._send(status, state.answer if status == 200 else {"error": {"message": "not so"}})

        def _send(self, status: int, value: Any) -> None:
            data = value if isinstance(value, bytes) else json.dumps(value).encode()
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


async def test_a_call_sends_the_configured_settings_and_requests_logprobs(
    endpoint: Endpoint,
) -> None:
    models = llms(endpoint.url, temperature=0.4, seed=3)
    assert await models.handle("r", "policy").ask("hello", max_tokens=7) == "hi"
    path, body = endpoint.requests[0]
    assert path == "/v1/chat/completions"
    assert body == {
        "model": "m", "messages": [{"role": "user", "content": "hello"}],
        "logprobs": True, "temperature": 0.4, "seed": 3, "max_tokens": 7,
    }  # fmt: skip
    await models.close()


async def test_a_gateway_is_not_asked_for_logprobs_that_it_records(endpoint: Endpoint) -> None:
    models = llms(endpoint.url)
    models.endpoints["policy"].records = True
    await models.handle("r", "policy").ask("hello")
    await models.handle("r", "policy").ask("hello", logprobs=True)  # the agent wants them itself
    assert [body["logprobs"] for _, body in endpoint.requests] == [False, True]
    await models.close()


async def test_a_pinned_run_names_the_step_of_its_llm_only(endpoint: Endpoint) -> None:
    models = llms(endpoint.url)
    for pinned in ("policy", "other"):
        llm = models.handle("r", "policy", {pinned: "p/m@3"})
        assert llm.model == llm.named("part").model == ("p/m@3" if pinned == "policy" else "m")
        await llm.ask("hello")
    assert [body["model"] for _, body in endpoint.requests] == ["p/m@3", "m"]
    await models.close()


async def test_a_call_to_an_overloaded_endpoint_is_retried(endpoint: Endpoint) -> None:
    endpoint.statuses = [503, 429]
    models = llms(endpoint.url)
    assert await models.handle("r", "policy").ask("hello") == "hi"
    assert len(endpoint.requests) == 3
    await models.close()


async def test_an_unavailable_or_refusing_endpoint_is_an_error(endpoint: Endpoint) -> None:
    endpoint.statuses = [503, 503, 503, 400]
    models = llms(endpoint.url)
    with pytest.raises(LlmUnavailable, match="LLM `policy` answered 503"):
        await models.handle("r", "policy").ask("hello")
    with pytest.raises(LlmRefused, match="answered 400: not so"):
        await models.handle("r", "policy").ask("hello")
    await models.close()
    unreachable = llms("http://127.0.0.1:9/v1", max_retries=0)
    with pytest.raises(LlmUnavailable, match="Cannot reach LLM `policy`"):
        await unreachable.handle("r", "policy").ask("hello")
    await unreachable.close()


async def test_a_redirect_and_an_answer_without_json_are_refusals(endpoint: Endpoint) -> None:
    endpoint.statuses = [307]
    endpoint.answer = b"<html>Log in</html>"
    models = llms(endpoint.url)
    with pytest.raises(LlmRefused, match="answered 307: not so"):
        await models.handle("r", "policy").ask("hello")
    with pytest.raises(LlmRefused, match="answered without JSON: <html>Log in"):
        await models.handle("r", "policy").ask("hello")
    assert len(endpoint.requests) == 2
    await models.close()


class Failing:
    """A client whose requests fail with `error`, if there is one."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.requests = 0

    async def request(self, *arguments: Any) -> Response:
        self.requests += 1
        if self.error:
            raise self.error
        return Response(200, json.dumps(ANSWER).encode(), "application/json")

    async def aclose(self) -> None: ...


@pytest.mark.parametrize(
    ("error", "attempts", "message"),
    [
        (ConnectionFailed("refused"), 2, "Cannot reach LLM `policy` at `http://h`: refused"),
        (ResponseTimeout(), 1, "LLM `policy` did not answer within 600 s"),
    ],
)
async def test_only_a_connection_that_fails_is_tried_again(
    error: Exception, attempts: int, message: str
) -> None:
    models = llms("http://h/v1", max_retries=1)
    client: Any = Failing(error)
    models.endpoints["policy"].http = client
    with pytest.raises(LlmUnavailable) as caught:
        await models.handle("r", "policy").ask("hello")
    assert caught.value.message == message
    assert client.requests == attempts


@pytest.mark.parametrize(
    ("answered", "settings", "seconds"),
    [
        (True, {}, ArtTrainerAdapterConfig.model_fields["wait_for_backend"].default),
        (False, {}, 20),  # its address may be wrong
        (True, {"max_retries": 3}, 2),
        (False, {"max_retries": 24}, 120),
    ],
)
async def test_an_endpoint_that_goes_away_is_waited_for_as_long_as_a_backend(
    monkeypatch: pytest.MonkeyPatch, answered: bool, settings: dict[str, int], seconds: float
) -> None:
    now = 0.0

    async def sleep(delay: float) -> None:
        nonlocal now
        now += delay

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(random, "uniform", lambda least, most: least)
    config = {"_type": "openai", "model_name": "m", "base_url": "http://h/v1", **settings}
    models = Llms({"policy": LlmConfig.model_validate(config)})
    client: Any = Failing(None)
    models.endpoints["policy"].http = client
    if answered:
        assert await models.handle("r", "policy").ask("hello") == "hi"
    client.error = ConnectionFailed("refused")
    with pytest.raises(LlmUnavailable, match="Cannot reach LLM"):
        await models.handle("r", "policy").ask("hello")
    assert seconds <= now < 1.5 * seconds
    await models.close()


async def test_without_a_gateway_the_handle_records_its_calls(endpoint: Endpoint) -> None:
    models = llms(endpoint.url)
    await models.probe()
    handle = models.handle("r", "policy")
    assert handle.base_url == endpoint.url
    await handle.named("plan").ask("hello")
    (call,) = await models.completions(handle)
    assert (call.function, call.text, call.recorded) == ("plan", "hi", False)
    # This endpoint returns no logprobs, so the run cannot be trained on.
    run = WorkflowRun(Example("e", "q", "a", {}), 0, reward=1.0)
    assert episodes.build(run, [call]) is None
    assert run.failure is Failure.NO_LOGPROBS
    assert run.error == "No valid assistant messages with logprobs"
    await models.close()


def test_a_gateway_url_identifies_run_llm_and_function() -> None:
    models = llms("http://h:8000/v1")
    models.endpoints["policy"].records = True
    handle = models.handle("run-1/a b", "policy")
    assert handle.base_url == "http://h:8000/rollouts/run-1%2Fa%20b~policy~/v1"
    assert handle.named("plan").base_url.endswith("~policy~plan/v1")


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_step_reward_must_be_finite(value: float) -> None:
    with pytest.raises(ValueError, match="must be a finite number"):
        llms("http://h:8000/v1").handle("r", "policy").reward(value)
