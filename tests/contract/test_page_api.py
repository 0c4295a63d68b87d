"""The page's API on a real server: what a client trains is what the page shows, token by token."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.page_run import write_eval, write_run
from tests.serving import Serving

MODEL = {"name": "page", "project": "contract", "base_model": "tiny-random"}
RUN = "/api/runs/contract/page"


def get(server: Serving, path: str, **query: Any) -> Any:
    response = httpx.get(server.control + path, params=query, timeout=60)
    assert response.status_code == 200, response.text
    assert response.headers["x-content-type-options"] == "nosniff"
    return json.loads(response.text, parse_constant=_refuse)


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def wait_for(check: Callable[[], Any], log: Path) -> Any:
    for _ in range(600):
        if found := check():
            return found
        time.sleep(0.1)
    raise AssertionError(log.read_text()[-3000:])


def chat(server: Serving, text: str, seed: int) -> Any:
    message = {"role": "user", "content": text}
    body = {"model": "page", "messages": [message], "max_tokens": 6, "seed": seed}
    answer = httpx.post(f"{server.openai}/v1/chat/completions", json=body, timeout=60)
    return message, answer.raise_for_status().json()["choices"][0]


def trajectory(server: Serving, text: str, reward: float, seed: int, **more: Any) -> Any:
    return {"messages_and_choices": [*chat(server, text, seed)], "reward": reward, **more}


@pytest.fixture(scope="module")
def trained(server: Serving) -> dict[str, Any]:
    """A step of a group that trains, one with equal rewards, and one that lost every run."""
    server.post("/_prepare_backend_for_training", {"model": MODEL, "config": None})
    judged = {
        "metrics": {"exact": 1.0, "short": 0.25},
        "metadata": {"example_id": "<script>alert(1)</script>", "reason/judge": "It is right"},
        "logs": ["RULER explanation: fine"],
    }
    first = [
        trajectory(server, "<img src=x onerror=alert(1)>\x00\x1b[31m", 1.0, 1, **judged),
        trajectory(server, "<img src=x onerror=alert(1)>\x00\x1b[31m", 0.0, 2),
    ]
    equal = [trajectory(server, "same", 0.5, seed) for seed in (3, 4)]
    fault = {"type": "ValueError", "message": "it broke", "traceback": ""}
    late = {"type": "<class 'openai.APITimeoutError'>", "message": "too late", "traceback": ""}
    groups = [
        {"trajectories": first, "exceptions": [fault]},
        {"trajectories": equal, "exceptions": []},
        {"trajectories": [], "exceptions": [late, fault], "metadata": {"example_id": "lost"}},
    ]
    body = {"model": MODEL, "trajectory_groups": groups, "config": {}, "dev_config": {}}
    response = httpx.post(f"{server.control}/_train_model", json=body, timeout=120)
    assert response.status_code == 200, response.text
    wait_for(lambda: True in get(server, f"{RUN}/steps")["kept"], server.log)
    return {"groups": groups}


def test_a_trained_step_has_its_groups_with_reasons(server: Serving, trained: Any) -> None:
    step = get(server, f"{RUN}/steps/1")
    first, second, third = step["groups"]
    assert first["trainable"] and first["n"] == 3 and (first["min"], first["max"]) == (0.0, 1.0)
    assert first["example"] == "<script>alert(1)</script>"
    assert not second["trainable"] and second["dropped"] == "equal_rewards"
    assert second["example"].startswith("same ("), "an example without an id is its prompt"
    assert step["metrics"]["train/reward"] == 0.5 and "learning_rate" in step["settings"]
    assert (third["example"], third["n"], third["dropped"]) == ("lost", 2, "empty_group")
    lost = {name: count for name, count in step["metrics"].items() if "/lost_" in name}
    assert lost == {"data/lost_ValueError": 2, "data/lost_APITimeoutError": 1}


def test_an_attempt_has_its_texts_parts_reasons_and_error(server: Serving, trained: Any) -> None:
    found = get(server, f"{RUN}/steps/1/groups/1")["attempts"]
    assert [it["reward"] for it in found] == [1.0, 0.0, None]
    assert found[0]["parts"] == {"exact": 1.0, "short": 0.25}
    assert {it["name"]: it["reason"] for it in found[0]["judge"]} == {
        "judge": "It is right",
        "RULER": "fine",
    }
    assert found[2]["error"] == "ValueError: it broke"
    user, answer = found[0]["conversations"][0]["messages"]
    assert user["content"] == "<img src=x onerror=alert(1)>\x00\x1b[31m" and not user["trained"]
    assert answer["trained"] and answer["role"] == "assistant"


def test_tokens_are_those_that_were_sampled_and_trained(server: Serving, trained: Any) -> None:
    attempts = get(server, f"{RUN}/steps/1/groups/1")["attempts"]
    for number in (0, 1):
        choice = trained["groups"][0]["trajectories"][number]["messages_and_choices"][1]
        tokens = get(server, f"{RUN}/attempts/1/{attempts[number]['id']}/tokens")
        chosen = [at for at, mask in enumerate(tokens["mask"]) if mask]
        assert [tokens["id"][at] for at in chosen] == choice["token_ids"]
        sampled = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert [tokens["logprob"][at] for at in chosen] == pytest.approx(sampled, abs=1e-4)
        # The same weights computed them, so the learner agrees with the engine.
        learner = [tokens["learner"][at] for at in chosen]
        assert learner == pytest.approx(sampled, abs=1e-2)
        advantages = {tokens["advantage"][at] for at in chosen}
        assert advantages == {attempts[number]["advantage"]}
        assert (advantages.pop() > 0) == (number == 0)
        assert {tokens["policy_step"][at] for at in chosen} == {0}
        assert all(isinstance(text, str) for text in tokens["text"])
        page = get(server, f"{RUN}/attempts/1/{attempts[number]['id']}/tokens", offset=2, limit=3)
        assert page["total"] == tokens["total"] and page["id"] == tokens["id"][2:5]


def test_a_group_that_was_not_trained_shows_its_tokens_too(server: Serving, trained: Any) -> None:
    attempt = get(server, f"{RUN}/steps/1/groups/2")["attempts"][0]
    tokens = get(server, f"{RUN}/attempts/1/{attempt['id']}/tokens")
    assert attempt["advantage"] is None and attempt["tokens"] == sum(tokens["mask"]) > 0
    assert set(tokens["learner"]) == {None}


def test_the_overview_series_examples_and_checkpoints(server: Serving, trained: Any) -> None:
    (run,) = [it for it in get(server, "/api/runs")["runs"] if it["name"] == "page"]
    assert run["live"] and run["base_model"] == "tiny-random" and run["step"] >= 1
    about = get(server, RUN)
    assert about["verdict"]["state"] in ("idle", "training", "sampling")
    assert about["missing"] == []
    assert {"train/reward", "loss/train", "time/step_s"} <= set(about["columns"])
    series = get(server, f"{RUN}/series", names="train/reward,loss/sampler_kl")
    assert series["series"]["train/reward"][series["step"].index(1)] == 0.5
    assert get(server, f"{RUN}/examples", order="example")["total"] >= 2
    assert len(get(server, f"{RUN}/audit")["signs"]) == 4
    checkpoints = get(server, f"{RUN}/checkpoints")
    assert checkpoints[0]["served"] and checkpoints[0]["parent"] == checkpoints[0]["step"] - 1
    assert isinstance(get(server, f"{RUN}/logs", tail=5)["lines"], list)
    assert get(server, f"{RUN}/config")["lora"]["rank"] == 8


def test_validation_and_supervised_steps_are_kept(server: Serving, trained: Any) -> None:
    logged = [
        {"trajectories": [trajectory(server, "check", 0.7, 5, metadata={"scenario_id": 9})]},
        {"trajectories": [], "exceptions": [{"type": "E", "message": "lost"}]},
    ]
    server.post("/_log", {"model": MODEL, "trajectory_groups": logged, "split": "val"})
    step = server.post("/_get_step", MODEL)
    path = f"{RUN}/steps/{step}"
    wait_for(
        lambda: httpx.get(f"{server.control}{path}?split=val", timeout=60).status_code == 200,
        server.log,
    )
    groups = get(server, path, split="val")["groups"]
    assert [(it["example"], it["mean"]) for it in groups] == [("9", 0.7), (None, None)]
    attempt = get(server, f"{path}/groups/1", split="val")["attempts"][0]
    tokens = get(server, f"{RUN}/attempts/{step}/{attempt['id']}/tokens", split="val")
    assert tokens["total"] == attempt["tokens"] > 0

    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "hello"}]
    body = {"model": MODEL, "trajectories": [{"messages_and_choices": messages}] * 3}
    answer = httpx.post(f"{server.control}/_train_sft", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    step += 1
    wait_for(lambda: step in get(server, f"{RUN}/steps")["step"], server.log)
    wait_for(lambda: get(server, f"{RUN}/steps")["kept"][-1], server.log)
    groups = get(server, f"{RUN}/steps/{step}")["groups"]
    assert len(groups) == 3 and all(it["trainable"] and it["mean"] is None for it in groups)
    attempt = get(server, f"{RUN}/steps/{step}/groups/1")["attempts"][0]
    tokens = get(server, f"{RUN}/attempts/{step}/{attempt['id']}/tokens")
    chosen = [at for at, mask in enumerate(tokens["mask"]) if mask]
    assert chosen and {tokens["advantage"][at] for at in chosen} == {1.0}
    assert all(tokens["learner"][at] is not None for at in chosen)


def test_a_page_hears_of_a_step_without_asking(server: Serving, trained: Any) -> None:
    heard: list[str] = []
    opened = threading.Event()

    def listen() -> None:
        with httpx.stream("GET", f"{server.control}/api/events", timeout=60) as stream:
            for line in stream.iter_lines():
                heard.append(line)
                opened.set()
                if line.startswith("data:") and '"page"' in line:
                    return

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    assert opened.wait(30)
    time.sleep(1.5)  # the first look only remembers what is there
    logged = [{"trajectories": [{"messages_and_choices": [], "reward": 0.1}]}]
    server.post("/_log", {"model": MODEL, "trajectory_groups": logged, "split": "val"})
    listener.join(30)
    assert not listener.is_alive(), heard
    assert "event: changed" in heard
    assert json.loads(heard[-1].removeprefix("data:"))["project"] == "contract"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/runs/contract/none", 404),
        ("/api/runs/..%2f..%2fetc/passwd", 404),
        (f"{RUN}/steps/999", 404),
        (f"{RUN}/steps/one", 400),
        (f"{RUN}/steps/1/groups/99", 404),
        (f"{RUN}/attempts/1/99/tokens", 404),
        (f"{RUN}/attempts/1/1/tokens?limit=-1", 400),
        (f"{RUN}/steps/1?split=../../x", 400),
        (f"{RUN}/compare?a=1", 400),
        (f"{RUN}/compare?a=1&b=x", 400),
        (f"{RUN}/compare?a=1&b=1&other=none", 400),
        (f"{RUN}/series?points=0", 400),
        (f"{RUN}/examples?order=colour", 400),
        ("/files/../api.py", 404),
        ("/files/%2e%2e/api.py", 404),
    ],
)
def test_bad_addresses_get_a_sentence(
    server: Serving, trained: Any, path: str, status: int
) -> None:
    response = httpx.get(server.control + path, timeout=60)
    assert response.status_code == status, response.text
    assert response.json()["error"]["message"]


def test_the_page_itself_has_a_strict_policy(server: Serving) -> None:
    response = httpx.get(server.control + "/", timeout=60)
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in response.headers["content-security-policy"]


@pytest.fixture
def viewing(tmp_path: Path) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    write_eval(write_run(tmp_path, steps=3, attempts=8))
    command = [sys.executable, "-m", "trainer", "view", str(tmp_path), "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()


def test_a_directory_is_viewed_without_a_server_and_ends_at_once(viewing: Any) -> None:
    address, process = viewing
    found = httpx.get(f"{address}api/runs", timeout=60).json()
    assert found["server"]["live"] is False and found["runs"][0]["step"] == 3
    about = httpx.get(f"{address}api/runs/demo/synthetic", timeout=60).json()
    assert about["verdict"]["state"] == "ended"
    evals = f"{address}api/runs/demo/synthetic/evals"
    (one,) = httpx.get(evals, timeout=60).json()["evals"]
    assert one["models"][1]["paired"]["clear"] and one["missing"] == []
    example = httpx.get(f"{evals}/val/examples", timeout=60).json()["rows"][0]["example"]
    found = httpx.get(f"{evals}/val/attempts", params={"example": example}, timeout=60).json()
    assert found["total"] == 8 and found["attempts"][0]["output"]
    assert httpx.get(f"{evals}/none/examples", timeout=60).status_code == 404
    foreign = httpx.get(f"{address}api/runs", headers={"host": "evil.example"}, timeout=60)
    assert foreign.status_code == 400
    with httpx.stream("GET", f"{address}api/events", timeout=60) as stream:
        next(stream.iter_lines())
        os.kill(process.pid, signal.SIGTERM)
        process.wait(10)  # an open page does not hold it up
