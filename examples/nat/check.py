"""Whether the guide worked: `check.py CONTROL_URL OPENAI_URL STEPS`; exits 1 with the reason."""

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
    """Of the likeliest first token: other weights give another one."""
    messages = [{"role": "user", "content": "What is 6 + 6?"}]
    body = {"model": model, "messages": messages, "max_tokens": 1, "temperature": 0}
    answer = post(f"{openai}/v1/chat/completions", body)
    return float(answer["choices"][0]["logprobs"]["content"][0]["logprob"])


def main(control: str, openai: str, steps: str) -> None:
    try:
        step = post(f"{control}/_get_step", {"project": PROJECT, "name": NAME})
    except urllib.error.HTTPError as error:
        sys.exit(f"error: {json.load(error)['detail']}: see NAT's output above")
    if step < int(steps):
        sys.exit(f"error: the run is at step {step}, not {steps}: see NAT's output above")
    before, after = logprob(openai, f"{NAME}@0"), logprob(openai, f"{NAME}@{step}")
    if before == after:
        sys.exit(f"error: the weights of step {step} are those of step 0: no group could teach")
    sys.stdout.write(f"trained to step {step}; a logprob went from {before:.5f} to {after:.5f}\n")


main(*sys.argv[1:])
