"""`kill -9` of server, engine and learner at every point of a step changes no checkpoint."""

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from kit.manifest import read_manifest, sha256
from tests.serving import Serving

BASE = "tiny-random"
MODEL = {"name": "run", "project": "faults", "base_model": BASE}
POINTS = [
    "server-journaled",
    "learner-begins",
    "learner-stepped",
    "server-row",
    "checkpoint-written",
    "checkpoint-renamed",
    "server-trained",
    "engine-loaded",
    "server-advanced",
    "server-streamed",
    "engine-sampling",
]
KILLS_THE_SERVER = {point for point in POINTS if point.startswith("server-")}


def groups(step: int) -> list[dict[str, Any]]:
    """Trajectories of exact tokens, other ones for every step."""

    def trajectory(number: int) -> dict[str, Any]:
        tokens = [(7 * step + 11 * number + place) % 200 + 20 for place in range(6)]
        content = [{"token": f"token_id:{token}", "logprob": -5.0} for token in tokens]
        choice = {
            "finish_reason": "stop",
            "index": 0,
            "message": {"role": "assistant", "content": "?"},
            "logprobs": {"content": content},
        }
        user = {"role": "user", "content": f"scenario {step}"}
        return {"messages_and_choices": [user, choice], "reward": float(number)}

    return [{"trajectories": [trajectory(number) for number in range(3)]}]


def ask_for_step(serving: Serving, step: int) -> list[str]:
    serving.post("/register", MODEL)
    serving.post("/_prepare_backend_for_training", {"model": MODEL})
    body = {
        "model": MODEL,
        "trajectory_groups": groups(step),
        "config": {"learning_rate": 1e-3},
    }
    answer = httpx.post(f"{serving.control}/_train_model", json=body, timeout=120)
    return answer.raise_for_status().text.splitlines()


def train(serving: Serving, step: int) -> list[str]:
    """One step as a patient client takes it: when the server dies, register and ask again."""
    for _ in range(3):
        try:
            rows = ask_for_step(serving, step)
            assert serving.post("/_get_step", MODEL) == step
            return rows
        except httpx.TransportError:
            serving.process.wait(120)
            serving.start()
    raise AssertionError(f"step {step} was not trained")


def hashes(serving: Serving) -> dict[str, Any]:
    checkpoints = serving.state / "faults" / "models" / "run" / "checkpoints"
    found = {}
    for path in sorted(checkpoints.iterdir()):
        manifest = read_manifest(path)
        assert manifest is not None, path
        found[path.name] = {name: entry["sha256"] for name, entry in manifest["files"].items()}
    return found


def sample(serving: Serving) -> int:
    ask: dict[str, Any] = {"model": "run", "messages": [{"role": "user", "content": "x"}]}
    ask |= {"n": 16, "max_tokens": 4}  # a random model may stop at once, but not sixteen times
    answer = httpx.post(f"{serving.openai}/v1/chat/completions", json=ask, timeout=300)
    answer.raise_for_status()
    return int(answer.json()["policy_step"])


def test_a_step_that_a_power_cut_takes_after_its_answer_is_made_again(tmp_path: Path) -> None:
    faults = tmp_path / "faults"
    faults.mkdir()
    with Serving(tmp_path / "state", BASE, ART_FAULTS=str(faults)) as serving:
        train(serving, 1)
        run = serving.state / "faults" / "models" / "run"
        (faults / "server-streamed").touch()
        with pytest.raises(httpx.TransportError):
            ask_for_step(serving, 2)
        expected = hashes(serving)
        # As the disk is found after a cut: the answer was delivered, the checkpoint never synced.
        (run / "journal.json").rename(run / "journal.delivered.json")
        weights = run / "checkpoints" / "0002" / "adapter_model.safetensors"
        weights.write_bytes(b"")
        serving.process.wait(120)
        serving.start()
        serving.post("/_prepare_backend_for_training", {"model": MODEL})
        assert serving.post("/_get_step", MODEL) == 2
        assert hashes(serving) == expected
        assert sha256(weights) == expected["0002"][weights.name]
        assert sample(serving) == 2
        train(serving, 3)


def test_a_server_that_is_killed_between_steps_serves_the_same_again(tmp_path: Path) -> None:
    def served() -> list[str]:
        found = httpx.get(f"{serving.openai}/v1/models", timeout=60).json()["data"]
        return [model["id"] for model in found if model["id"].startswith("run")]

    with Serving(tmp_path, BASE) as serving:
        train(serving, 1)
        serving.process.kill()
        serving.process.wait(120)
        serving.start()
        while not served():  # the base model is there before
            assert serving.process.poll() is None
            time.sleep(0.1)
        assert sample(serving) == 1
        serving.process.terminate()
        serving.process.wait(120)
        serving.start()  # after an end that was asked for, clients register anew
        assert served() == []


def test_a_run_with_a_kill_in_every_step_ends_with_the_checkpoints_of_a_calm_one(
    tmp_path: Path,
) -> None:
    steps = range(1, len(POINTS) + 1)
    with Serving(tmp_path / "calm", BASE) as calm:
        calm_rows = [train(calm, step) for step in steps]
        expected = hashes(calm)
    faults = tmp_path / "faults"
    faults.mkdir()
    with Serving(tmp_path / "stormy", BASE, ART_FAULTS=str(faults)) as stormy:
        for step, point in zip(steps, POINTS, strict=True):
            before = stormy.process.pid
            if point != "engine-sampling":
                (faults / point).touch()
            rows = train(stormy, step)
            if point == "engine-sampling":  # else the step's own canary would set it off
                (faults / point).touch()
            assert sample(stormy) == step  # served, whoever was killed
            assert not (faults / point).exists(), f"`{point}` was never reached"
            assert (stormy.process.pid != before) == (point in KILLS_THE_SERVER), point
            assert rows == calm_rows[step - 1], point
        assert hashes(stormy) == expected
    assert len(expected) == len(POINTS) + 1
