"""openai, over chat completions."""

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
from openai import OpenAI


def client(url):
    return OpenAI(base_url=url, api_key=KEY).chat.completions


def chat(url, model):
    return client(url).create(model=model, messages=[user(HELLO)]).choices[0].message.content


def stream(url, model):
    chunks = client(url).create(model=model, messages=[user(HELLO)], stream=True)
    return [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]


def tools(url, model):
    messages = [user(SUM)]
    while True:
        message = (
            client(url).create(model=model, messages=messages, tools=[TOOL]).choices[0].message
        )
        if not message.tool_calls:
            return message.content
        messages.append(message)
        for call in message.tool_calls:
            result = str(add(**arguments_of(call)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def forced(url, model):
    answer = client(url).create(
        model=model, messages=[user(CALL_IT)], tools=[TOOL], tool_choice=NAMED
    )
    return arguments_of(answer.choices[0].message.tool_calls[0])


def structured(url, model):
    answer = client(url).parse(model=model, messages=[user(DESCRIBE)], response_format=Number)
    return answer.choices[0].message.parsed.model_dump()


def turns(url, model):
    messages = [user(INTRODUCTION)]
    first = client(url).create(model=model, messages=messages).choices[0].message
    messages += [first, user(WHO)]
    return client(url).create(model=model, messages=messages).choices[0].message.content


def completions(url, model):
    answer = OpenAI(base_url=url, api_key=KEY).completions.create(
        model=model, prompt=HELLO, echo=True, logprobs=1, max_tokens=1
    )
    logprobs = answer.choices[0].logprobs.token_logprobs
    return answer.choices[0].text.startswith(HELLO) and logprobs[0] is None and logprobs[1] < 0
