"""A tool agent on Anthropic's own package: OPENAI_URL MODEL. One rollout streams, one does not."""

import sys
from typing import Any

import anthropic
from common import report

QUESTION = "What is 2 + 3?"
ADD: Any = {
    "name": "add",
    "description": "Adds two numbers",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    },
}


def client(url: str, rollout: str = "") -> anthropic.Anthropic:
    base_url = f"{url}/rollouts/{rollout}" if rollout else url
    return anthropic.Anthropic(base_url=base_url, api_key="any", max_retries=0)


def agent(api: anthropic.Anthropic, model: str, *, stream: bool) -> tuple[list[Any], list[str]]:
    """Return the answers until one calls no tool, and the kinds of events of the first one."""
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    answers: list[Any] = []
    kinds: list[str] = []
    while not answers or answers[-1].stop_reason == "tool_use":
        request = {"model": model, "max_tokens": 200, "system": "You add.", "tools": [ADD]}
        if stream:
            with api.messages.stream(**request, messages=messages) as events:
                kinds += [event.type for event in events] if not answers else []
                answer: Any = events.get_final_message()
        else:
            answer = api.messages.create(**request, messages=messages)
        answers.append(answer)
        results = [
            {
                **{"type": "tool_result", "tool_use_id": block.id},
                "content": str(block.input["a"] + block.input["b"]),
            }
            for block in answer.content
            if block.type == "tool_use"
        ]
        messages += [
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": results},
        ]
    return answers, kinds


def refusal(api: anthropic.Anthropic, **fields: Any) -> tuple[str, str]:
    """The class and the message of the error that a request raises."""
    request: Any = {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}], **fields}
    try:
        api.messages.create(**request)
    except anthropic.APIStatusError as error:
        body: Any = error.body
        return type(error).__name__, body["error"]["type"] + ": " + body["error"]["message"]
    return "", ""


def main(url: str, model: str) -> None:
    plain, _ = agent(client(url, "anthropic-0"), model, stream=False)
    streamed, kinds = agent(client(url, "anthropic-1"), model, stream=True)
    api = client(url)
    question: Any = {"role": "user", "content": QUESTION}
    count = api.messages.count_tokens(
        model=model, system="You add.", tools=[ADD], messages=[question]
    )
    report(
        answers=[[answer.model_dump() for answer in answers] for answers in (plain, streamed)],
        kinds=kinds,
        count=count.input_tokens,
        refusals=[
            refusal(api, model="nope"),
            refusal(api, model=model, extra_body={"container": "c"}),
            refusal(api, model=model, max_tokens=0),
        ],
    )


main(*sys.argv[1:])
