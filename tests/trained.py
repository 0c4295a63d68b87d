"""What a step was trained on, read from the journal of the model."""

import json
import time
from typing import Any

import httpx

from tests.serving import Serving
from trainer.base_model.resolve import resolve
from trainer.base_model.tokenizer import Tokenizer
from trainer.learner.tokenize import tokenize_trajectory


def train(server: Serving, name: str, trajectories: list[Any]) -> tuple[list[list[int]], Any]:
    """Train one step of model `contract/NAME`; return the ids it trained on, and its metrics."""
    # A job stays in the journal until a client reads its result, so its request can be read here.
    job = {"model_id": f"contract~{name}", "trajectory_groups": [{"trajectories": trajectories}]}
    created = httpx.post(f"{server.openai}/v1/preview/training-jobs", json=job, timeout=60)
    job_id = created.raise_for_status().json()["id"]
    step = int(job_id.rpartition("~")[2])
    deadline = time.monotonic() + 120
    while server.post("/_get_step", {"name": name, "project": "contract"}) < step:
        assert time.monotonic() < deadline, server.log.read_text()[-2000:]
        time.sleep(0.1)
    directory = server.state / "contract" / "models" / name
    request = json.loads((directory / f"journal.{step:04}.json").read_text())
    tokenizer = Tokenizer(resolve(request["base_model"]))
    trained = [
        sequence.ids
        for trajectory in request["groups"][0]["trajectories"]
        for sequence in tokenize_trajectory(tokenizer, trajectory).sequences
    ]
    events = f"{server.openai}/v1/preview/training-jobs/{job_id}/events"
    httpx.get(events, timeout=60).raise_for_status()
    lines = [json.loads(line) for line in (directory / "history.jsonl").read_text().splitlines()]
    return trained, next(line for line in lines if line["step"] == step)
