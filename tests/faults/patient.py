"""A patient client: it trains step after step, whatever happens to the server meanwhile."""

import time
from typing import Any

import httpx

from kit.manifest import read_manifest
from tests.serving import Serving

BASE = "tiny-random"
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
"""Points of a step at which a process can be killed (`trainer/faults.py`)."""
MODEL = {"name": "run", "project": "faults", "base_model": BASE}
PATIENCE_S = 240
TRY_AGAIN = (429, 500, 503, 507)


class Refused(Exception):
    """An answer with an error, which a patient client reads and tries again."""

    def __init__(self, response: httpx.Response) -> None:
        super().__init__(f"{response.status_code}: {response.text}")
        self.status = response.status_code
        self.text = response.text


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


def prepare(serving: Serving) -> int:
    """Register the model, and return the step that the server is at."""
    _post(serving, "/register", MODEL)
    _post(serving, "/_prepare_backend_for_training", {"model": MODEL})
    return int(_post(serving, "/_get_step", MODEL).json())


def ask_for_step(serving: Serving, step: int, parent: int | None = None) -> list[str]:
    """Ask once, and return the rows of metrics. `parent` is the step to train from."""
    body = {
        "model": MODEL,
        "trajectory_groups": groups(step),
        "config": {"learning_rate": 1e-3},
    }
    query = "" if parent is None else f"?parent_step={parent}"
    return _post(serving, f"/_train_model{query}", body).text.splitlines()


def train(serving: Serving, step: int) -> list[str]:
    """Train one step: start a server that died again, and ask until the step is there.

    Returns the rows, or none if the answer was lost on its way to this client.
    """
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            at = prepare(serving)
            assert at in (step - 1, step), f"at step {at} instead of {step}"
            # Until it is delivered, the same request gets the same step, and its rows again.
            if at == step and not is_pending(serving, step):
                return []
            rows = ask_for_step(serving, step)
            assert prepare(serving) == step
            return rows
        except httpx.TransportError:
            restart_if_dead(serving)
        except Refused as refused:
            assert refused.status in TRY_AGAIN, refused
            time.sleep(0.2)
            restart_if_dead(serving)
    raise AssertionError(f"step {step} was not trained in {PATIENCE_S} s")


def restart_if_dead(serving: Serving) -> None:
    time.sleep(0.1)  # a process that was just killed still looks alive
    if serving.process.poll() is not None:
        serving.start()


def hashes(serving: Serving) -> dict[str, Any]:
    """The sha256 of every file of every checkpoint, by step."""
    found = {}
    for path in sorted((_directory(serving) / "checkpoints").iterdir()):
        manifest = read_manifest(path)
        assert manifest is not None, path
        found[path.name] = {name: entry["sha256"] for name, entry in manifest["files"].items()}
    return found


def sample(serving: Serving) -> int:
    """Chat with the model, and return the step that answered."""
    ask: dict[str, Any] = {"model": "run", "messages": [{"role": "user", "content": "x"}]}
    ask |= {"n": 16, "max_tokens": 4}  # a random model may stop at once, but not sixteen times
    answer = httpx.post(f"{serving.openai}/v1/chat/completions", json=ask, timeout=300)
    answer.raise_for_status()
    return int(answer.json()["policy_step"])


def _directory(serving: Serving) -> Any:
    return serving.state / MODEL["project"] / "models" / MODEL["name"]


def is_pending(serving: Serving, step: int) -> bool:
    """Whether the answer of a step waits for its client."""
    return bool((_directory(serving) / f"journal.{step:04}.json").is_file())


def _post(serving: Serving, path: str, body: Any) -> httpx.Response:
    response = httpx.post(serving.control + path, json=body, timeout=PATIENCE_S)
    if response.is_error:
        raise Refused(response)
    return response
