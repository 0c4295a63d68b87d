"""openai, over its Responses API."""

import json

from common import CALL_IT, DESCRIBE, HELLO, INTRODUCTION, KEY, SCHEMA, SUM, WHO, Number, add
from openai import OpenAI

FUNCTION = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}


def client(url):
    return OpenAI(base_url=url, api_key=KEY).responses


def chat(url, model):
    return client(url).create(model=model, input=HELLO).output_text


def stream(url, model):
    events = client(url).create(model=model, input=HELLO, stream=True)
    return [event.delta for event in events if event.type == "response.output_text.delta"]


def tools(url, model):
    said = SUM
    previous = None
    while True:
        answer = client(url).create(
            model=model, input=said, tools=[FUNCTION], previous_response_id=previous
        )
        called = [item for item in answer.output if item.type == "function_call"]
        if not called:
            return answer.output_text
        previous = answer.id
        said = [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": str(add(**json.loads(call.arguments))),
            }
            for call in called
        ]


def forced(url, model):
    answer = client(url).create(
        model=model,
        input=CALL_IT,
        tools=[FUNCTION],
        tool_choice={"type": "function", "name": "add"},
    )
    return json.loads(answer.output[-1].arguments)


def structured(url, model):
    answer = client(url).parse(model=model, input=DESCRIBE, text_format=Number)
    return answer.output_parsed.model_dump()


def turns(url, model):
    first = client(url).create(model=model, input=INTRODUCTION)
    answer = client(url).create(model=model, input=WHO, previous_response_id=first.id)
    return answer.output_text
