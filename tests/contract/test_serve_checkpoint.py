"""`trainer serve --from`: a pulled checkpoint, served without training."""

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.environments import client_environment
from tests.serving import Serving

QUESTION = [{"role": "user", "content": "Say something"}]
WIRE = {"name": "keeper", "project": "served", "base_model": "tiny-random", "trainable": True}


def chat(server: Serving, name: str) -> dict[str, Any]:
    body = {"model": name, "messages": QUESTION, "max_tokens": 8, "seed": 3, "logprobs": True}
    url = f"{server.openai}/v1/chat/completions"
    return dict(httpx.post(url, json=body, timeout=120).raise_for_status().json())


def logprobs(answer: dict[str, Any]) -> list[float]:
    return [token["logprob"] for token in answer["choices"][0]["logprobs"]["content"]]


@pytest.fixture(scope="module")
def pulled(server: Serving, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Step 1 of a run that the shared server has trained, copied as `launcher pull` does."""
    server.post("/_prepare_backend_for_training", {"model": WIRE})
    talk = [*QUESTION, {"role": "assistant", "content": "something"}]
    body = {"model": WIRE, "trajectories": [{"messages_and_choices": talk}]}
    body["config"] = {"learning_rate": 1e-2}
    answer = httpx.post(f"{server.control}/_train_sft", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    place = "served/models/keeper/checkpoints/0001"
    to = tmp_path_factory.mktemp("laptop") / "checkpoints" / place
    shutil.copytree(server.state / place, to)
    return to


@pytest.fixture(scope="module")
def serving(
    pulled: Path, tmp_path_factory: pytest.TempPathFactory, art_cache: str
) -> Iterator[Serving]:
    directory = tmp_path_factory.mktemp("anywhere")
    with Serving(directory, None, "--from", str(pulled), ART_CACHE=art_cache) as it:
        while httpx.get(f"{it.control}/health", timeout=60).json()["status"] == "starting":
            time.sleep(0.1)  # the base model is served before
        yield it


def content(directory: Path) -> dict[str, tuple[int, bytes]]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_a_pulled_checkpoint_answers_under_its_own_name_and_step(
    server: Serving, serving: Serving, pulled: Path
) -> None:
    listed = httpx.get(f"{serving.openai}/v1/models", timeout=60).json()["data"]
    assert {"keeper", "keeper@1", "tiny-random@base"} <= {one["id"] for one in listed}
    there = chat(server, "keeper@1")
    before = content(pulled.parents[3])
    for name in ("keeper", "keeper@1", "served/keeper@1", "tiny-random"):
        here = chat(serving, name)
        assert here["policy_step"] == 1
        assert here["choices"][0]["token_ids"] == there["choices"][0]["token_ids"]
        assert logprobs(here) == logprobs(there)
    assert logprobs(chat(serving, "tiny-random@base")) != logprobs(there)
    assert content(pulled.parents[3]) == before
    unknown = httpx.get(f"{serving.openai}/v1/models/keeper@7", timeout=60)
    assert unknown.status_code == 404 and "`keeper@1`" in unknown.json()["error"]["hint"]


def test_every_request_that_would_change_a_model_is_refused_by_name(
    serving: Serving, pulled: Path
) -> None:
    before = content(pulled.parents[3])
    routes = httpx.get(f"{serving.control}/openapi.json", timeout=60).json()["paths"]
    changing = [
        (method.upper(), path.replace("{model_id}", "served~keeper"))
        for path, methods in routes.items()
        for method in methods
        if method != "get"
        and (path.startswith("/v1/preview/") or not path.startswith(("/v1/", "/rollouts", "/api")))
        and path not in ("/_get_step", "/close")
    ]
    assert len(changing) > 12, changing
    for method, path in changing:
        for body in ({}, {"model": WIRE}, WIRE):
            answer = httpx.request(method, serving.control + path, json=body, timeout=60)
            assert answer.status_code == 409, (method, path, answer.text)
            fault = answer.json()["error"]
            assert f"`{path}`" in fault["message"] and "`keeper@1`" in fault["message"]
            assert "without `--from`" in fault["hint"]
    assert serving.post("/_get_step", WIRE) == 1
    events = f"{serving.control}/v1/preview/training-jobs/served~keeper~1/events"
    assert httpx.get(events, timeout=60).status_code == 409
    steps = f"{serving.control}/v1/preview/models/served~keeper/checkpoints"
    assert [one["step"] for one in httpx.get(steps, timeout=60).json()["data"]] == [1]
    assert content(pulled.parents[3]) == before
    assert not (serving.state / "served").exists()


def refusal(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "serve", "--port", "0", "--openai-port", "0", *arguments],
        env={**client_environment(), **environment}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    return done.stderr


def test_what_cannot_be_served_is_named(pulled: Path, tmp_path: Path) -> None:
    copy = tmp_path / "keeper" / "0001"
    shutil.copytree(pulled, copy)
    other = refusal("--from", str(copy), BASE_MODEL="other/model")
    assert "`BASE_MODEL` is `other/model`" in other and "`tiny-random`" in other
    around = refusal("--from", str(copy.parent))
    assert "is not one checkpoint" in around and str(copy) in around
    assert "There is no checkpoint `nowhere`" in refusal("--from", "nowhere")
    weights = copy / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    damaged = refusal("--from", str(copy))
    assert f"`{weights}` does not match its sha256" in damaged
    weights.unlink()
    assert f"`{weights}` is missing" in refusal("--from", str(copy))
