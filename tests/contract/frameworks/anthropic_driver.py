"""anthropic, over its Messages API. Its base URL has no `/v1`."""

from anthropic import Anthropic
from common import (
    CALL_IT,
    DESCRIBE,
    HELLO,
    INTRODUCTION,
    KEY,
    SCHEMA,
    SUM,
    WHO,
    Number,
    add,
    assistant,
    user,
)

FUNCTION = {"name": "add", "description": "Add two numbers.", "input_schema": SCHEMA}


def client(url):
    return Anthropic(base_url=url.removesuffix("/v1"), api_key=KEY)


def ask(url, model, *messages, **settings):
    return client(url).messages.create(
        model=model, max_tokens=500, messages=list(messages), **settings
    )


def chat(url, model):
    return ask(url, model, user(HELLO)).content[0].text


def stream(url, model):
    with client(url).messages.stream(model=model, max_tokens=500, messages=[user(HELLO)]) as events:
        return list(events.text_stream)


def tools(url, model):
    messages = [user(SUM)]
    while True:
        answer = ask(url, model, *messages, tools=[FUNCTION])
        if answer.stop_reason != "tool_use":
            return answer.content[-1].text
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": str(add(**block.input))}
            for block in answer.content
            if block.type == "tool_use"
        ]
        messages += [assistant(answer.content), user(results)]


def forced(url, model):
    choice = {"type": "tool", "name": "add"}
    return ask(url, model, user(CALL_IT), tools=[FUNCTION], tool_choice=choice).content[0].input


def structured(url, model):
    answer = client(url).messages.parse(
        model=model, max_tokens=500, messages=[user(DESCRIBE)], output_format=Number
    )
    return answer.parsed_output.model_dump()


def turns(url, model):
    first = ask(url, model, user(INTRODUCTION)).content[0].text
    return ask(url, model, user(INTRODUCTION), assistant(first), user(WHO)).content[0].text
