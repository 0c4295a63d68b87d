"""Bad input gets a 4xx with a sentence before a stream starts, and never a 500."""

import json
import math
import random
import socket
from pathlib import Path
from typing import Any

import httpx
import pydantic
import pytest

from tests.contract.hostile import BODIES, PLAIN, VALUES, leaves, replaced
from tests.serving import Serving
from trainer.config import ServerConfig
from trainer.server.app import create_app
from trainer.server.backend import Backend

BASE = "tiny-random"
MODEL = {"name": "bad-input", "project": "contract", "base_model": BASE}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def prepared(server: Serving) -> Serving:
    server.post("/register", MODEL)
    server.post("/_prepare_backend_for_training", {"model": MODEL})
    return server


def group(*rewards: Any, choice: Any = None) -> dict[str, Any]:
    turns = [CHAT["messages"][0], choice or {"finish_reason": "stop", "message": {}}]
    return {"trajectories": [{"messages_and_choices": turns, "reward": r} for r in rewards]}


def choice_of(*tokens: str) -> dict[str, Any]:
    content = [{"token": token, "logprob": -1.0} for token in tokens]
    message = {"role": "assistant", "content": "x"}
    return {"finish_reason": "stop", "message": message, "logprobs": {"content": content}}


TRAIN = {"model": MODEL, "trajectory_groups": []}
HUGE_TOKENS = group(0, 1, choice=choice_of("token_id:99999999999"))
HUGE = (1.7e308, 1.7e308)
NAN = json.dumps({**TRAIN, "trajectory_groups": [group(1, math.nan)]}).encode()
NO_TURNS = {"messages_and_choices": 5}
NO_METRICS = {"trajectories": [{"reward": 1, "metrics": ["x"]}]}
PREPARE = {"model": MODEL}
ARGS = {"server_args": "x"}
BASE_MODEL = {"model": BASE}
PARTS = {"role": "user", "content": [1]}
CALLS = {"role": "assistant", "content": "", "tool_calls": ["x"]}
SELF: dict[str, Any] = {"chat_template_kwargs": {"self": 1}}
DEEP_CALL = {
    **{"role": "assistant", "content": ""},
    "tool_calls": [{"function": {"name": "f", "arguments": "[" * 2000}}],
}
DEEP_EXCHANGE = {
    "trajectories": [
        {
            "exchanges": {
                "chat_completions": [
                    {
                        "request": {"model": "bad-input", "messages": [CHAT["messages"][0]]},
                        "response": {"choices": [{"finish_reason": "stop", "message": DEEP_CALL}]},
                    }
                ]
            },
            "reward": reward,
        }
        for reward in (0, 1)
    ]
}
REQUIRED = {"tool_choice": "required"}
NO_TARGETS = {"_internal_config": {"peft_args": {"target_modules": []}}}
SFT: dict[str, Any] = {"model": MODEL, "trajectories": []}
VARIABLES: dict[str, Any] = {"chat_template_kwargs": {"tools": []}}


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/register", b"{", 422, "`body` is not JSON"),
        ("/register", b"\xff\xfe{}", 422, "body"),
        ("/register", b"[" * 5000, 400, "nested deeper"),
        ("/register", b"{}", 422, "`name`"),
        ("/register", [], 422, "body"),
        ("/register", {**MODEL, "_internal_config": {"peft_args": 3}}, 422, "`peft_args`"),
        ("/nowhere", {}, 404, "/nowhere"),
        ("/_get_step", {**MODEL, "name": "nobody"}, 404, "`nobody`"),
        ("/_train_model", {**TRAIN, "model": {**MODEL, "name": "nobody"}}, 404, "`nobody`"),
        (
            "/_train_model",
            {**TRAIN, "trajectory_groups": [{"trajectories": "x"}]},
            422,
            "not a list",
        ),
        ("/_train_model", {**TRAIN, "trajectory_groups": [group(1, "a")]}, 400, "reward"),
        ("/_train_model", {**TRAIN, "trajectory_groups": [group(1, None)]}, 400, "reward"),
        ("/_train_model", {**TRAIN, "trajectory_groups": [group(*HUGE)]}, 400, "`1.7e+308`"),
        ("/_train_model", {**TRAIN, "trajectory_groups": [group(10**400)]}, 422, "401 digits"),
        ("/_train_model", NAN, 400, "the reward `nan`"),
        ("/_log", {**TRAIN, "trajectory_groups": [group(10**300)]}, 400, "997 bits"),
        ("/_train_model", {**TRAIN, "config": {"learning_rate": "x"}}, 400, "learning_rate"),
        ("/_train_model", {**TRAIN, "dev_config": {"colour": "blue"}}, 400, "colour"),
        ("/_train_model", {**TRAIN, "trajectory_groups": [HUGE_TOKENS]}, 400, "99999999999"),
        ("/_train_model?parent_step=5", TRAIN, 409, "to be trained from step 5"),
        ("/_train_model?parent_step=-1", TRAIN, 422, "`parent_step`"),
        ("/_train_sft", {"model": MODEL, "trajectories": [NO_TURNS]}, 422, "not a list"),
        ("/_prepare_backend_for_training", {**PREPARE, "config": ARGS}, 400, "`server_args`"),
        ("/_log", {**TRAIN, "split": "../x"}, 422, "`split`"),
        ("/_log", {**TRAIN, "trajectory_groups": [NO_METRICS]}, 400, "`metrics`"),
        ("/_log", {**TRAIN, "trajectory_groups": [group("a")]}, 400, "the reward `a`"),
        ("/_delete_checkpoint_files", {"model": MODEL, "steps_to_keep": "all"}, 422, "steps"),
        ("/_delete_checkpoints?benchmark_smoothing=2", MODEL, 400, "`benchmark_smoothing`"),
        ("/_experimental_deploy", {"model": MODEL, "deploy_to": "together"}, 400, "`together`"),
        ("/_experimental_fork_checkpoint", {"model": MODEL, "from_model": "no"}, 404, "`no`"),
        ("/_experimental_push_to_s3", {"model": MODEL}, 400, "bucket"),
        ("/_experimental_pull_from_s3", {"model": MODEL, "s3_bucket": "../x"}, 422, "s3_bucket"),
        ("/v1/chat/completions", {**CHAT, "model": "bad-input@99"}, 404, "`bad-input@99`"),
        ("/v1/chat/completions", {**CHAT, **BASE_MODEL, "messages": [PARTS]}, 400, "template"),
        ("/v1/chat/completions", {**CHAT, **BASE_MODEL, "messages": [CALLS]}, 400, "template"),
        ("/v1/chat/completions", {**CHAT, **BASE_MODEL, **VARIABLES}, 400, "`tools`"),
        ("/v1/preview/training-jobs", {"model_id": "x~y", "trajectory_groups": []}, 404, "`y`"),
        ("/v1/preview/models", {**MODEL, "name": "../x"}, 422, "`name`"),
        (
            "/v1/preview/models",
            {**MODEL, "name": "new", "base_model": "other"},
            409,
            "`tiny-random`",
        ),
    ],
)
def test_a_bad_request_is_answered_with_a_sentence(
    prepared: Serving, path: str, body: Any, status: int, message: str
) -> None:
    content = {"content": body} if isinstance(body, bytes) else {"json": body}
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(prepared.control + path, timeout=60, headers=headers, **content)
    assert (answer.status_code, message in answer.json()["detail"]) == (status, True), answer.text
    assert answer.json()["error"]["message"] == answer.json()["detail"]
    assert prepared.post("/_get_step", MODEL) == 0


@pytest.mark.parametrize(
    "path",
    [
        "/v1/preview/models/nobody~x/checkpoints",
        "/v1/preview/models/..~x/checkpoints",
        "/v1/preview/training-jobs/contract~bad-input~99/events",
        "/v1/preview/training-jobs/contract~bad-input~x/events",
        "/v1/models/nobody",
        "/rollouts/nobody",
    ],
)
def test_a_missing_object_is_a_404(prepared: Serving, path: str) -> None:
    answer = httpx.get(prepared.openai + path, timeout=60)
    assert answer.status_code == 404 and answer.json()["detail"]


def test_a_body_with_too_large_a_content_length_is_refused(prepared: Serving) -> None:
    url = httpx.URL(prepared.control)
    with socket.create_connection((url.host, url.port), timeout=10) as client:
        client.sendall(
            b"POST /register HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999999999\r\n\r\n"
        )
        assert client.recv(64).startswith(b"HTTP/1.1 413")


def test_max_seq_length_limits_sampling(server: Serving) -> None:
    short = {**MODEL, "name": "short", "_internal_config": {"init_args": {"max_seq_length": 64}}}
    server.post("/register", short)
    server.post("/_prepare_backend_for_training", {"model": short})
    url = f"{server.openai}/v1/chat/completions"
    fits = httpx.post(url, json={"model": "short", "messages": CHAT["messages"]}, timeout=60)
    assert fits.json()["usage"]["total_tokens"] <= 64
    long = {"model": "short", "messages": [{"role": "user", "content": "x" * 64}]}
    refused = httpx.post(url, json=long, timeout=60)
    assert refused.status_code == 400 and "`max_seq_length`" in refused.json()["detail"]


@pytest.mark.parametrize("route", BODIES)
def test_no_hostile_value_anywhere_in_a_body_is_a_server_error(
    server: Serving, route: str, rounds: int
) -> None:
    """Each case replaces one place of a valid body; `--rounds 100` runs all of them."""
    server.post("/register", PLAIN)
    server.post("/_prepare_backend_for_training", {"model": PLAIN})
    cases = [(place, value) for place in leaves(BODIES[route]) for value in VALUES]
    chosen = random.Random(route).sample(cases, min(len(cases), 24 * rounds))
    headers = {"Content-Type": "application/json"}
    with httpx.Client(base_url=server.control, headers=headers, timeout=120) as client:
        for place, value in chosen:
            answer = client.post(route, content=replaced(BODIES[route], place, value))
            assert answer.status_code < 500, (place, value[:60], answer.text)
            if answer.status_code >= 400:
                assert answer.json()["error"]["message"], (place, value[:60])


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/chat/completions", {**CHAT, "model": "bad-input@" + "9" * 5000}, 404, "bad-input"),
        ("/v1/chat/completions", {**CHAT, "model": "bad-input@²"}, 404, "bad-input@²"),
        ("/v1/chat/completions", {**CHAT, "model": BASE, **SELF}, 400, "`self`"),
        ("/v1/chat/completions", {**CHAT, "model": BASE, "messages": [DEEP_CALL]}, 200, ""),
        ("/v1/responses", {"model": BASE, "input": "x", **REQUIRED}, 400, "there is no tool"),
        ("/register", {**MODEL, "name": "no-targets", **NO_TARGETS}, 400, "targets"),
        ("/register", {**MODEL, "name": "no-base", "base_model": ""}, 409, "holds"),
        ("/_train_sft", {**SFT, "trajectories": [{"tools": 1.5}]}, 422, "`tools`"),
        ("/_train_model", {**TRAIN, "config": {"learning_rate": 1e308}}, 400, "learning_rate"),
        ("/_train_sft", {**SFT, "config": {"learning_rate": 1e308}}, 400, "learning_rate"),
        ("/_train_sft", {**SFT, "trajectories": HUGE_TOKENS["trajectories"]}, 400, "99999999999"),
        ("/_train_model", {**TRAIN, "trajectory_groups": [DEEP_EXCHANGE]}, 400, "did not sample"),
    ],
)
def test_values_that_once_were_server_errors(
    prepared: Serving, path: str, body: Any, status: int, message: str
) -> None:
    answer = httpx.post(prepared.control + path, json=body, timeout=120)
    assert answer.status_code == status and message in answer.text, answer.text


@pytest.mark.parametrize(
    ("path", "field"), [("/_train_model", "trajectory_groups"), ("/_train_sft", "trajectories")]
)
def test_a_request_with_nothing_to_train_on_makes_no_step(
    server: Serving, path: str, field: str
) -> None:
    model = {**MODEL, "name": "nothing"}
    server.post("/register", model)
    server.post("/_prepare_backend_for_training", {"model": model})
    answer = httpx.post(server.control + path, json={"model": model, field: []}, timeout=120)
    assert answer.status_code == 400 and "holds no trajectories" in answer.text
    assert server.post("/_get_step", model) == 0


async def test_require_key_applies_to_loopback_too(tmp_path: Path) -> None:
    key = pydantic.SecretStr("secret")
    config = ServerConfig(require_key=True, api_key=key, state_dir=str(tmp_path))
    app = httpx.ASGITransport(create_app(config, Backend(config, openai_port=8000)))
    async with httpx.AsyncClient(transport=app, base_url="http://127.0.0.1") as client:
        assert (await client.get("/health")).status_code == 200
        for path in ("/v1/models", "/rollouts/x", "/v1/preview/models/a~b/checkpoints"):
            assert (await client.get(path)).status_code == 401
        assert (await client.post("/register", json=MODEL)).status_code == 401
        right = {"Authorization": "Bearer secret"}
        assert (await client.get("/v1/models", headers=right)).status_code == 200
