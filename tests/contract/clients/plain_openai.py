"""Without ART: sample with `openai`, train with the control API: CONTROL_URL OPENAI_URL."""

import sys
from typing import Any

import httpx
import openai
from common import BASE, QUESTION, fingerprint, report, reward


def main(control: str, openai_url: str) -> None:
    client = openai.OpenAI(base_url=f"{openai_url}/v1", api_key="any")
    http = httpx.Client(base_url=control, timeout=120)
    model = {"name": "openai", "project": "contract", "base_model": BASE}
    http.post("/register", json=model).raise_for_status()
    prepared = http.post("/_prepare_backend_for_training", json={"model": model})
    assert prepared.raise_for_status().json() == [f"{openai_url}/v1", "default"]
    fingerprints, steps = [fingerprint(openai_url, "openai")], [0]
    sampled = []
    for _ in range(2):
        answer = client.chat.completions.create(
            model="openai", messages=QUESTION, max_tokens=8, n=4
        )
        trajectories: list[dict[str, Any]] = [
            {"messages_and_choices": [*QUESTION, choice.model_dump()], "reward": reward(number)}
            for number, choice in enumerate(answer.choices)
        ]
        sampled.append([choice.model_dump()["token_ids"] for choice in answer.choices])
        body = {"model": model, "trajectory_groups": [{"trajectories": trajectories}]}
        body["config"] = {"learning_rate": 1e-3}
        http.post("/_train_model", json=body).raise_for_status()
        steps.append(http.post("/_get_step", json=model).json())
        fingerprints.append(fingerprint(openai_url, "openai"))
    names = [served.id for served in client.models.list()]
    report(steps=steps, fingerprints=fingerprints, names=names, sampled=sampled)


main(*sys.argv[1:])
