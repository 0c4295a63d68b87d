"""Check that the guide trained: `check.py CONTROL_URL OPENAI_URL STEPS`; exit 1 if it did not."""

import json
import sys
import urllib.error
import urllib.request
from typing import Any

PROJECT, NAME = "my_project", "my_training_run"


def post(url: str, body: Any) -> Any:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def logprob(openai: str, model: str) -> float:
    """Return the logprob of the likeliest first token, which differs between weights."""
    messages = [{"role": "user", "content": "What is 6 + 6?"}]
    body = {"model": model, "messages": messages, "max_tokens": 1, "temperature": 0}
    answer = post(f"{openai}/v1/chat/completions", body)
    return float(answer["choices"][0]["logprobs"]["content"][0]["logprob"])


def main(control: str, openai: str, steps: str) -> None:
    try:
        step = post(f"{control}/_get_step", {"project": PROJECT, "name": NAME})
    except urllib.error.HTTPError as error:
        sys.exit(f"error: {json.load(error)['detail']}; see NAT's output above")
    if step < int(steps):
        sys.exit(f"error: the run is at step {step}, not {steps}; see NAT's output above")
    before, after = logprob(openai, f"{NAME}@0"), logprob(openai, f"{NAME}@{step}")
    if before == after:
        sys.exit(f"error: the weights of step {step} equal those of step 0: no group had a signal")
    sys.stdout.write(f"trained to step {step}; a logprob went from {before:.5f} to {after:.5f}\n")


main(*sys.argv[1:])
