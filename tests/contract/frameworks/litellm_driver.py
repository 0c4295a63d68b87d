"""LiteLLM."""

import json

import litellm
from common import (
    CALL_IT,
    DESCRIBE,
    HELLO,
    INTRODUCTION,
    KEY,
    NAMED,
    SUM,
    TOOL,
    WHO,
    Number,
    add,
    arguments_of,
    user,
)


def ask(url, model, *messages, **settings):
    return litellm.completion(
        model=f"openai/{model}", api_base=url, api_key=KEY, messages=list(messages), **settings
    )


def chat(url, model):
    return ask(url, model, user(HELLO)).choices[0].message.content


def stream(url, model):
    chunks = ask(url, model, user(HELLO), stream=True)
    return [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]


def tools(url, model):
    messages = [user(SUM)]
    while True:
        message = ask(url, model, *messages, tools=[TOOL]).choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message)
        for call in message.tool_calls:
            result = str(add(**arguments_of(call)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def forced(url, model):
    answer = ask(url, model, user(CALL_IT), tools=[TOOL], tool_choice=NAMED)
    return arguments_of(answer.choices[0].message.tool_calls[0])


def structured(url, model):
    answer = ask(url, model, user(DESCRIBE), response_format=Number)
    return json.loads(answer.choices[0].message.content)


def turns(url, model):
    first = ask(url, model, user(INTRODUCTION)).choices[0].message
    return ask(url, model, user(INTRODUCTION), first, user(WHO)).choices[0].message.content


def completions(url, model):
    answer = litellm.text_completion(
        model=f"text-completion-openai/{model}",
        api_base=url,
        api_key=KEY,
        prompt=HELLO,
        echo=True,
        max_tokens=1,
    )
    return answer.choices[0].text.startswith(HELLO)
