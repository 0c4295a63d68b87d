"""smolagents, whose tool-calling agent requires a call in every step."""

import json

from common import (
    CALL_IT,
    DESCRIBE,
    HELLO,
    INTRODUCTION,
    KEY,
    NUMBER_FORMAT,
    SUM,
    WHO,
    add,
    arguments_of,
    assistant,
    user,
)
from smolagents import OpenAIModel, ToolCallingAgent, tool

adder = tool(add)


def llm(url, model):
    return OpenAIModel(model_id=model, api_base=url, api_key=KEY)


def ask(url, model, *messages, **settings):
    parts = [[{"type": "text", "text": message["content"]}] for message in messages]
    said = [{**message, "content": part} for message, part in zip(messages, parts, strict=True)]
    return llm(url, model).generate(said, **settings)


def chat(url, model):
    return ask(url, model, user(HELLO)).content


def stream(url, model):
    deltas = llm(url, model).generate_stream([user(HELLO)])
    return [delta.content for delta in deltas if delta.content]


def tools(url, model):
    return ToolCallingAgent(tools=[adder], model=llm(url, model), verbosity_level=0).run(SUM)


def forced(url, model):
    # A call is required whenever there are tools.
    return arguments_of(ask(url, model, user(CALL_IT), tools_to_call_from=[adder]).tool_calls[0])


def structured(url, model):
    return json.loads(ask(url, model, user(DESCRIBE), response_format=NUMBER_FORMAT).content)


def turns(url, model):
    first = ask(url, model, user(INTRODUCTION)).content
    return ask(url, model, user(INTRODUCTION), assistant(first), user(WHO)).content
